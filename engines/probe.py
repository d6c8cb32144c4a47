"""Finds out what an unknown server is: its dialect, its models, and whether it has token routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from engines.dialect import Dialect, ObservationError
from engines.http import AnswerTooLarge, BadResponse, ConnectionBroken, HttpClient, ResponseTimeout
from engines.sglang import Sglang
from engines.vllm import Vllm

DIALECTS: dict[str, type[Vllm] | type[Sglang]] = {Vllm.kind: Vllm, Sglang.kind: Sglang}


class UnknownKind(ObservationError):
    """A model server that does not tell its dialect. One that is named its kind may be used."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of an engine, as its `/v1/models` reports it."""

    model_id: str
    max_context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a server turned out to be."""

    dialect: Dialect
    models: tuple[Model, ...]


async def discover(http: HttpClient, kind: str | None, timeout_s: float) -> Discovery:
    """Ask a server for its models and, unless `kind` is given, for its dialect.

    Raises:
        UnknownKind: its dialect is needed.
        ObservationError: it answers, but not as an engine does. Otherwise what HttpClient raises.
    """
    models, owners = await _models_and_owners(http, timeout_s)
    if kind is None:
        kind = next((owner for owner in owners if owner in DIALECTS), None)
    if kind is None and "heddle" in owners:
        raise ObservationError("this is a Heddle gateway; an engine's URL is wanted")
    if kind is None:
        raise UnknownKind(f"neither vLLM nor SGLang (models owned by {owners})")
    return Discovery(DIALECTS[kind](), models)


async def models_of(http: HttpClient, timeout_s: float) -> tuple[Model, ...]:
    """Ask a server for its models. Raises what `discover` raises."""
    models, _ = await _models_and_owners(http, timeout_s)
    return models


async def _models_and_owners(http: HttpClient, timeout_s: float) -> tuple[tuple[Model, ...], list[str]]:
    status, body = await http.get("/v1/models", timeout_s)
    if status != 200:
        raise ObservationError(f"/v1/models answered {status}")
    try:
        cards = orjson.loads(body)["data"]
        limits = {card["id"]: _positive(card.get("max_model_len")) for card in cards}
        # An adapter's card has no limit, which is that of its model.
        models = tuple(Model(_name(card), limits[card["id"]] or limits.get(card.get("parent"))) for card in cards)
        return models, sorted({str(card.get("owned_by")) for card in cards})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ObservationError(f"/v1/models is not a list of models: {error!r}") from None


def _name(card: Mapping[str, Any]) -> str:
    """The name with which a request gets the model."""
    name, parent = str(card["id"]), card.get("parent")
    # SGLang lists a LoRA adapter by its own name, but to a request that names only that it answers without the adapter
    # (0.5.23, srt/entrypoints/openai/serving_base.py).
    return f"{parent}:{name}" if parent and card.get("owned_by") == Sglang.kind else name


async def tells_tokens(dialect: Dialect, http: HttpClient, timeout_s: float) -> bool:
    """Ask a server for its token routes.

    Returns: whether it answered; a server that broke off counts as having none, and must be asked again.
    Raises: EngineUnreachable, NoMoreConnections.
    """
    try:
        await dialect.find_tokens(http, timeout_s)
    except (ConnectionBroken, BadResponse, ResponseTimeout, AnswerTooLarge) as fault:
        dialect.tokens, dialect.tokens_note = None, f"it did not tell ({fault}), and is asked again"
        return False
    return True


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
