"""Log-probabilities of an answer's tokens in OpenAI's two forms.

`as_ids`: tokens are named by their ids, as vLLM's `return_tokens_as_token_ids` asks for.
"""

from typing import Any

from engines.simulated.live import Generation
from engines.simulated.text import Tokenizer


def chat_logprobs(
    tokenizer: Tokenizer, generation: Generation, begin: int, end: int, as_ids: bool = False
) -> dict[str, Any] | None:
    """The chat form for tokens `begin` to `end`; None if none were asked for."""
    logprobs = generation.answer.logprobs
    if logprobs is None:
        return None
    content = []
    for id, (own, rivals) in zip(generation.answer.token_ids[begin:end], logprobs[begin:end], strict=True):
        entry = _entry(tokenizer, id, own)
        entry["top_logprobs"] = [_entry(tokenizer, rival, value) for rival, value in rivals]
        if as_ids:  # the bytes of the token itself stay those of its text, as in vLLM
            entry["token"] = _name(id)
            entry["top_logprobs"] = [
                {"token": _name(rival), "logprob": value, "bytes": list(_name(rival).encode())}
                for rival, value in rivals
            ]
        content.append(entry)
    return {"content": content}


def token_logprobs(generation: Generation, begin: int, end: int) -> dict[str, Any] | None:
    """The form of vLLM's token route, which has ids but no texts."""
    logprobs = generation.answer.logprobs
    if logprobs is None:
        return None
    content = []
    for id, (own, rivals) in zip(generation.answer.token_ids[begin:end], logprobs[begin:end], strict=True):
        top = [{"token_id": rival, "logprob": value, "rank": None} for rival, value in rivals]
        content.append({"token_id": id, "logprob": own, "rank": None, "top_logprobs": top})
    return {"content": content}


def completion_logprobs(
    tokenizer: Tokenizer, generation: Generation, begin: int, end: int, as_ids: bool = False
) -> dict[str, Any] | None:
    """The form of the older completion route."""
    logprobs = generation.answer.logprobs
    if logprobs is None:
        return None

    def name(id: int) -> str:
        return _name(id) if as_ids else tokenizer.decode([id])

    # vLLM counts the names that it tells.
    texts = list(map(_name, generation.answer.token_ids)) if as_ids else generation.answer.texts
    offset = sum(map(len, texts[:begin]))
    offsets = []
    for text in texts[begin:end]:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [own for own, _ in logprobs[begin:end]],
        "tokens": [name(id) for id in generation.answer.token_ids[begin:end]],
        "top_logprobs": [{name(id): value for id, value in rivals} for _, rivals in logprobs[begin:end]],
    }


def _name(id: int) -> str:
    return f"token_id:{id}"


def _entry(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.bytes_of(id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
