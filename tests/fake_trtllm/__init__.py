"""A `tensorrt_llm` without TensorRT: its names and signatures come from tests/golden/trtllm_api.json.

contract.py   the JSON -> classes of one profile ("1.2.1" or "main"), which refuse what the real ones refuse
machine.py    what an engine does, with the oddities that users reported
package.py    both put together as the modules that an adapter imports
path/         a `tensorrt_llm` for PYTHONPATH: processes of Ray import it as they would the real one
"""
