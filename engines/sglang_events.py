"""Reads the events of SGLang's native stream (SGLang 0.5.23, srt/managers/tokenizer_manager.py).

Each event has the text, the ids and the log-probabilities of all tokens so far; if the server was started with
`--incremental-streaming-output`, of the new tokens only.
"""

from collections.abc import Sequence
from typing import Any

from engines.tokens import ErrorEvent, Piece, Rendered, parsed


class EventReader:
    """Reads one stream."""

    def __init__(self, is_incremental: bool, rendered: Rendered, only_numbers: bool) -> None:
        self._only_numbers = only_numbers
        self._is_incremental = is_incremental
        self._stop_ids = rendered.call["sampling_params"].get("stop_token_ids") or ()
        self._has_text = not rendered.needs_parser
        self._num_ids = self._num_rated = self._num_characters = 0

    def __call__(self, data: bytes) -> Piece:
        event = parsed(data)
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        kind, matched = (reason["type"], reason.get("matched")) if reason else (None, None)
        if kind == "abort":  # in an incremental stream an abort repeats the last token, and the text from the start
            if reason.get("status_code") is not None:  # such as 400: the request itself is wrong
                raise ErrorEvent({"error": {"message": reason.get("message"), "code": reason["status_code"]}})
            return Piece([], finish_reason="abort")
        ids, text = event["output_ids"], event["text"]
        rated, rivals = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
        if not self._is_incremental:
            ids, self._num_ids = ids[self._num_ids :], len(ids)
            text, self._num_characters = text[self._num_characters :], len(text)
            if rated is not None:
                rivals = rivals[self._num_rated :] if rivals else None
                rated, self._num_rated = rated[self._num_rated :], len(rated)
        spans = (meta.get("weight_versions") or ()) if kind else ()
        return Piece(
            ids,
            text if self._has_text else "",
            self._entries(rated, rivals) if rated is not None else None,
            kind,
            # A token that ends every answer is not worth reporting; one that the client named is.
            matched if isinstance(matched, str) or matched in self._stop_ids else None,
            tuple((span["version"], span["start"], span["end"]) for span in spans),
            meta.get("cached_tokens"),
        )

    def _entries(self, rated: Sequence[Sequence[Any]], rivals: Sequence[Any] | None) -> list[Any]:
        return [token[0] for token in rated] if self._only_numbers else _entries(rated, rivals)


def _entries(rated: Sequence[Sequence[Any]], rivals: Sequence[Any] | None) -> list[dict[str, Any]]:
    entries = []
    for i, token in enumerate(rated):
        top = (rivals[i] if rivals else None) or ()
        entries.append({**_entry(*token), "top_logprobs": [_entry(*rival) for rival in top]})
    return entries


def _entry(logprob: float, _: int, text: str | None) -> dict[str, Any]:
    said = text or ""
    # Part of a character has no text of its own, and its bytes are not reported.
    return {"token": said, "logprob": logprob, "bytes": None if "\ufffd" in said else list(said.encode())}
