"""Routes that both engines have in the same form: models, chats, completions, tokens of a text, embeddings."""

import base64
import struct
from functools import partial
from zlib import crc32

from engines.simulated.dialect import Dialect
from engines.simulated.exchange import Exchange, InvalidField
from engines.simulated.fields import Body, flag
from engines.simulated.openai_api import chat_completions, chat_prompt, completions, prompts_of
from engines.simulated.routes import Routes
from engines.simulated.service import EngineService
from engines.simulated.text import packed

_EMBEDDING_SIZE = 32


def common_routes(service: EngineService, dialect: Dialect) -> Routes:
    """The table of these routes."""
    return {
        ("GET", "/v1/models"): partial(_models, service),
        ("POST", "/v1/chat/completions"): partial(chat_completions, service, dialect),
        ("POST", "/v1/completions"): partial(completions, service, dialect),
        ("POST", "/tokenize"): partial(_tokenize, service, dialect),
        ("POST", "/v1/embeddings"): partial(_embeddings, service, dialect),
    }


def model_card(service: EngineService) -> Body:
    """One entry of the list of models."""
    return {
        "id": service.served_name,
        "object": "model",
        "created": int(service.started_at),
        "owned_by": service.settings.dialect,
        "root": service.settings.profile.model,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def _models(service: EngineService, exchange: Exchange) -> None:
    await exchange.respond_json({"object": "list", "data": [model_card(service)]})


async def _tokenize(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    body = await exchange.json()
    dialect.check_model(body)
    dialect.check_tokenize(body)
    if "messages" in body:
        ids = chat_prompt(service, body)
    elif isinstance(body.get("prompt"), str):
        ids = list(service.tokenizer.encode(body["prompt"]))
    else:
        raise InvalidField("prompt", "Input should be a valid string")
    answer: Body = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": None}
    if flag(body, "return_token_strs"):
        answer["token_strs"] = [service.tokenizer.decode([id]) for id in ids]
    await exchange.respond_json(answer)


async def _embeddings(service: EngineService, dialect: Dialect, exchange: Exchange) -> None:
    """Vectors that are equal for equal texts, and otherwise meaningless."""
    body = await exchange.json()
    dialect.check_model(body)
    prompts = prompts_of(service, body, "input")
    data = []
    for index, prompt in enumerate(prompts):
        raw = packed(prompt)
        vector = [(crc32(raw, number) % 2001 - 1000) / 1000 for number in range(_EMBEDDING_SIZE)]
        embedding: object = vector
        if body.get("encoding_format") == "base64":
            embedding = base64.b64encode(struct.pack(f"<{_EMBEDDING_SIZE}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    await exchange.respond_json({"object": "list", "data": data, "model": service.settings.model, "usage": usage})
