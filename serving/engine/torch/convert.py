"""GGUF to safetensors: dequantised to bfloat16, with the names and the order that transformers expects.

Only the `llama` architecture, which is what the known models are. Imported by serving.manifest when a
model is prepared, never afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from serving.errors import StartError
from serving.progress import Progress

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TOKENIZER_SHARE = 0.6  # of the whole time; the vocabulary is parsed slowly


def convert_gguf(source: Path, directory: Path, report: Progress) -> None:
    """Fill the empty `directory` with config, generation config, tokenizer and model.safetensors."""
    report("reading the tokenizer", 0.0)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    report("reading the weights", _TOKENIZER_SHARE)
    reader = gguf.GGUFReader(source)
    config = _config(source, reader)
    config.save_pretrained(directory)
    generation: Any = GenerationConfig
    generation(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    each = (0.95 - _TOKENIZER_SHARE) / len(reader.tensors)
    for done, tensor in enumerate(reader.tensors):
        report("converting the weights", _TOKENIZER_SHARE + done * each)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = _halves_apart(values, config.num_attention_heads)
        elif ".attn_k." in tensor.name:
            values = _halves_apart(values, config.num_key_value_heads or config.num_attention_heads)
        tensors[_name(tensor.name)] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    report("writing", 0.95)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    report("done", 1.0)


def _config(source: Path, reader: gguf.GGUFReader) -> LlamaConfig:
    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise StartError(f"{source}: GGUF architecture {architecture!r}; allowed: llama")
    names = {tensor.name for tensor in reader.tensors}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 12),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="output.weight" not in names,
        dtype="bfloat16",
    )


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *path, kind = name.split(".")
    if path[0] == "blk":
        return f"model.layers.{path[1]}.{_LAYER_NAMES[path[2]]}.{kind}"
    return f"{_TOP_NAMES[path[0]]}.{kind}"


def _halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF stores each head's rotated pairs side by side; transformers wants first halves, then second."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])  # (heads, dim/2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
