"""Whether engines can stand for each other in a trial, and the model that they all serve."""

from collections.abc import Sequence

from engines.dialect import ObservationError
from engines.http import FAULTS, HttpClient
from engines.probe import discover

_TIMEOUT_S = 60.0  # Seen: over 10 s, from a vLLM that had just started on a busy machine.


class UnfitEngine(Exception):
    """The engines cannot be compared on; the message names the one that is why."""


async def common_model(urls: Sequence[str], wanted: str | None) -> str:
    """The model that a rollout asks for: `wanted`, or the first engine's first one that all serve.

    Raises:
        UnfitEngine: an engine does not serve it, does not answer, or has ranks.
    """
    models_of = {url: await _models_of(url) for url in urls}
    for url, models in models_of.items():
        if wanted is not None and wanted not in models:
            raise UnfitEngine(f"{url}: no model {wanted!r} there; it serves: {', '.join(models) or 'none'}")
    if wanted is not None:
        return wanted
    for model in models_of[urls[0]]:
        if all(model in models for models in models_of.values()):
            return model
    served = "; ".join(f"{url} serves {', '.join(models) or 'none'}" for url, models in models_of.items())
    raise UnfitEngine(f"no model is served by all engines: {served}")


async def _models_of(url: str) -> list[str]:
    """The models of a server, which has no data-parallel ranks. Raises UnfitEngine."""
    http = HttpClient(url)
    try:
        found = await discover(http, None, _TIMEOUT_S)
        num_engines = len(await found.dialect.observe(http, _TIMEOUT_S))
    except (*FAULTS, ObservationError) as error:
        raise UnfitEngine(f"{url}: {error}") from None
    finally:
        http.close()
    if num_engines > 1:
        raise UnfitEngine(
            f"{url} has data-parallel ranks, whose shared front end is not simulated: start servers without"
        )
    return [model.model_id for model in found.models]
