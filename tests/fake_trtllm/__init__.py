"""A `tensorrt_llm` without TensorRT: its names and signatures come from tests/golden/trtllm_api.json.

contract.py   the JSON -> classes of one profile ("1.2.1" or "main"), which refuse what the real ones refuse
requests.py   what is asked for, and what a step says about it; feed.py carries it out of the engine
machine.py    what an engine does, with the oddities that users reported
events.py     the KV events it tells
knobs.py      the faults that a test orders
package.py    both put together as the modules that an adapter imports
path/         a `tensorrt_llm` for PYTHONPATH: processes of Ray import it as they would the real one
"""
