"""Training data of the examples: what the SDK calls a ``Datum``, from lists of tokens."""

from collections.abc import Sequence

from tinker import types


def supervised_datum(prompt: Sequence[int], completion: Sequence[int]) -> types.Datum:
    """Return an example that predicts every token of the completion and none of the prompt."""
    tokens = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return _datum(tokens, weights=weights)


def policy_datum(prompt: Sequence[int], sample: types.SampledSequence, advantages: Sequence[float]) -> types.Datum:
    """Return a sampled sequence for a policy loss: its own logprobs, and an advantage for each of its tokens."""
    before = [0.0] * (len(prompt) - 1)
    return _datum(
        [*prompt, *sample.tokens],
        logprobs=before + list(sample.logprobs or []),
        advantages=[*before, *advantages],
    )


def _datum(tokens: Sequence[int], **floats: Sequence[float]) -> types.Datum:
    """Return next-token prediction over ``tokens``, with inputs of one number for each target."""
    shape = [len(tokens) - 1]
    inputs = {name: types.TensorData(data=values, dtype="float32", shape=shape) for name, values in floats.items()}
    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=shape)
    model_input = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets, **inputs})
