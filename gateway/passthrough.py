"""Requests that belong to no trajectory: embeddings, tokenizing, token counts. Any engine with the model can serve
them.
"""

from codecs import BOM_UTF8

import orjson

from engines.http import FAULTS, AnswerTooLarge, BadResponse, Response
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.http.client import Client, Headers, header_lines, unless_left
from gateway.http.errors import Api, api_error, engine_error
from gateway.http.outlet import Outlet
from gateway.http.refusals import Refused, bad_model, no_engine, no_engine_with
from gateway.turns.outcome import failed_leg
from gateway.turns.request_reader import lacks_model, parse_object

# An allow-list: no other route of an engine, above all its control routes, can be reached.
PASSTHROUGH_ROUTES: dict[str, Api] = {
    "/v1/embeddings": "other",
    "/v1/messages/count_tokens": "messages",
    "/tokenize": "other",
    "/detokenize": "other",
    "/v1/tokenize": "other",
    "/v1/detokenize": "other",
}

_NO_ROUTE = (404, 405)
# Embeddings in bytes need it to be read (vLLM 0.32, pooling/utils.py).
_METADATA = b"metadata"
_JSON = b"application/json"


class Passthrough:
    """Passes whole requests on; to another engine if the first one fails."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet

    async def serve(self, client: Client, outlet: Outlet, path: str) -> None:
        """Answer one request. Raises Refused, or ClientLeft."""
        settings = self._settings
        body = (await client.read(settings.max_body_bytes, settings.body_timeout_s)).removeprefix(BOM_UTF8)
        request = parse_object(body, client.scope["headers"])
        model, known = request.get("model"), self._fleet.models()
        if model == "":  # to vLLM, no model is named
            model = None
        if model is not None and not isinstance(model, str):
            raise bad_model(known)
        if model is not None and known and model not in known:
            raise lacks_model(self._fleet, model)
        status, answer, form = await unless_left(client, self._ask(path, body, model))
        if status != 200:
            raise Refused(engine_error(status, answer))
        outlet.whole(200, answer, form=form)

    async def _ask(self, path: str, body: bytes, model: str | None) -> tuple[int, bytes, Headers]:
        """The first answer that is not its engine's failure, else the last: its status, body and form. Raises Refused.

        An engine that lacks the route has not been tried: kinds of engines differ in the routes that they have.
        """
        await self._fleet.started()
        if model is None and not self._fleet.has_common_model():  # any engine would answer, also with another model's
            raise bad_model(self._fleet.models())
        members = sorted(self._fleet.serving(model), key=lambda member: (member.server.is_updating, member.num_legs))
        if not members:
            if model is not None and self._fleet.serving(None):
                raise no_engine_with(model)
            raise no_engine(len(self._fleet.members()))
        answered: tuple[int, bytes, Headers] | None = None
        lacking: tuple[int, bytes, Headers] | None = None
        failure: Exception | None = None
        num_tries = 0
        for member in members:
            if num_tries == self._settings.max_attempts:
                break
            self._fleet.leg_began(member)
            fault: Exception | None = None
            has_answered = False
            try:
                response = await member.http.request("POST", path, body, timeout_s=self._settings.silence_timeout_s)
                answer = await response.body(self._settings.max_answer_bytes, self._settings.silence_timeout_s)
                if response.ends_at_eof and _is_cut(response, answer):
                    raise BadResponse("its answer was cut short")
                has_answered = True
                if response.status in _NO_ROUTE:
                    lacking = response.status, answer, _form(response)
                    continue
                answered = response.status, answer, _form(response)
                if response.status < 500 and response.status != 429:
                    break
            except AnswerTooLarge as error:  # every engine would answer the same
                refusal = failed_leg(error)
                raise Refused(refusal.error, should_retry=refusal.should_retry) from None
            except FAULTS as error:
                fault = failure = error
            finally:
                self._fleet.leg_ended(member, fault, has_answered)
            num_tries += 1
        if answered is None and failure is not None:
            failed = api_error(502, f"The engine failed: {failure}.", "engine_failed")
            raise Refused(failed, retry_after_s=1.0, should_retry=True)
        answered = answered or lacking
        assert answered is not None, "every engine answered, failed or lacks the route"
        return answered


def _is_cut(response: Response, answer: bytes) -> bool:
    """Whether an answer whose length was not told lacks its end, as far as that can be seen: only in JSON."""
    if response.status != 200 or not _content_type(response).startswith(_JSON):
        return False
    try:
        orjson.loads(answer)
    except orjson.JSONDecodeError:
        return True
    return False


def _content_type(response: Response) -> bytes:
    return response.headers.get(b"content-type", _JSON)


def _form(response: Response) -> Headers:
    """The headers that tell how to read an answer's body."""
    form = [(b"content-type", _content_type(response))]
    if _METADATA in response.headers:
        form.append((_METADATA, response.headers[_METADATA]))
    return header_lines(form)
