"""Writes a tiny base model of random weights, with a real architecture and tokenizer, for demos and tests."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_VOCABULARY = 320
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one by <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, *, seed: int = 0) -> None:
    """Write a Qwen3 of about 0.6 M float32 parameters and a byte-level tokenizer with a chat template to ``directory``."""
    tokenizer = _byte_tokenizer()
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0 to 255 are the bytes themselves."""
    alphabet = _byte_alphabet()
    vocabulary = {symbol: byte for byte, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_alphabet() -> list[str]:
    """Return the printable stand-in of every byte, by byte, as GPT-2's byte-level scheme defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in stand_in)
    stand_in |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [stand_in[byte] for byte in range(256)]
