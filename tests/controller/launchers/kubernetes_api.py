"""A double of the few Kubernetes API routes that are used here, over real HTTP, strict about what it is sent.

It follows kube-apiserver wherever the launcher could tell the difference: conflicts, graceful deletion, permissions
(the rules of the given roles), and the schema of each Pod, taken from the official client's models. It has no
admission, defaults or watches. The same tests run on the real kube-apiserver: see kubernetes_site.
"""

import asyncio
import datetime
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kubernetes.client.models as models
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

Json = dict[str, Any]
PODS = "/api/v1/namespaces/{namespace}/pods"


class ApiDouble:
    """An API server in a thread of its own. `objects` are what it holds, by kind and name.

    Args:
        allows: whether "controller-token" may do this, by verb, resource, name and namespace; "admin-token" may do all.
        log_of: the last lines of a Pod, at most this many; None if it has not run.
    """

    def __init__(self, allows: Callable[[str, str, str, str], bool], log_of: Callable[[str, int], str | None]) -> None:
        self.objects: dict[str, dict[str, Json]] = {"pods": {}, "nodes": {}, "configmaps": {}}
        self.used: set[tuple[str, str]] = set()  # verbs and resources that "controller-token" was allowed
        self._allows, self._log_of = allows, log_of
        self._lock = threading.RLock()
        routes = [
            Route("/api/v1/{kind}", self._collection, methods=["GET", "POST"]),
            Route("/api/v1/namespaces/{namespace}/{kind}", self._collection, methods=["GET", "POST"]),
            Route("/api/v1/namespaces/{namespace}/{kind}/{name}", self._one, methods=["GET", "DELETE"]),
            Route(PODS + "/{name}/log", self._log, methods=["GET"]),
            Route(PODS + "/{name}/binding", self._bind, methods=["POST"]),
            Route(PODS + "/{name}/status", self._patch_status, methods=["PATCH"]),
            Route("/api/v1/nodes/{name}/status", self._patch_status, methods=["PATCH"]),
            Route("/api/v1/nodes/{name}", self._delete_node, methods=["DELETE"]),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        """Start the server; gives its URL."""
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join()

    async def _collection(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        if request.method == "GET":
            if refused := self._refusal(request, "list", kind):
                return refused
            wanted = request.query_params.get("labelSelector", "")
            with self._lock:
                found = [each for each in self.objects[kind].values() if _has_labels(each, wanted)]
            return JSONResponse({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found})
        if refused := self._refusal(request, "create", kind):
            return refused
        made = await request.json()
        name = made["metadata"]["name"]
        if problems := schema_problems(made, {"pods": "V1Pod", "nodes": "V1Node", "configmaps": "V1ConfigMap"}[kind]):
            return _status(422, "Invalid", "; ".join(problems))
        with self._lock:
            if name in self.objects[kind]:
                return _status(409, "AlreadyExists", f'{kind} "{name}" already exists')
            made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
            made.setdefault("status", {"phase": "Pending"} if kind == "pods" else {})
            self.objects[kind][name] = made
        return JSONResponse(made, 201)

    async def _one(self, request: Request) -> Response:
        kind, name = request.path_params["kind"], request.path_params["name"]
        if refused := self._refusal(request, request.method.lower(), kind, name):
            return refused
        # As in the real server, a body replaces the query; without either, the Pod's own grace period applies.
        how = orjson.loads(await request.body() or b"{}") or dict(request.query_params)
        with self._lock:
            if (there := self.objects[kind].get(name)) is None:
                return _status(404, "NotFound", f'{kind} "{name}" not found')
            if request.method == "DELETE":
                grace = int(how.get("gracePeriodSeconds", there["spec"].get("terminationGracePeriodSeconds", 30)))
                if how.get("preconditions", {}).get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
                    return _status(409, "Conflict", "the UID in the precondition does not match")
                if (
                    grace == 0
                    or not there["spec"].get("nodeName")
                    or there["status"]["phase"] in ("Succeeded", "Failed")
                ):
                    del self.objects[kind][name]
                elif "deletionTimestamp" not in there["metadata"]:
                    there["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace}
            return JSONResponse(there)

    async def _log(self, request: Request) -> Response:
        name = request.path_params["name"]
        if refused := self._refusal(request, "get", "pods/log", name):
            return refused
        log = await asyncio.to_thread(self._log_of, name, int(request.query_params.get("tailLines", "100000")))
        if log is None:
            return _status(400, "BadRequest", "container is waiting to start")
        # As the kubelet does it: the first bytes of these lines, not the last ones.
        return PlainTextResponse(log.encode()[: int(request.query_params.get("limitBytes", "100000000"))])

    async def _bind(self, request: Request) -> Response:
        if refused := self._refusal(request, "create", "pods/binding"):
            return refused
        target = (await request.json())["target"]["name"]
        with self._lock:
            self.objects["pods"][request.path_params["name"]]["spec"]["nodeName"] = target
        return _status(201, "", "")

    async def _patch_status(self, request: Request) -> Response:
        kind = "pods" if "namespace" in request.path_params else "nodes"
        if refused := self._refusal(request, "patch", f"{kind}/status"):
            return refused
        status = (await request.json())["status"]
        for container in status.get("containerStatuses", ()):
            container["state"] = {state: value for state, value in container["state"].items() if value is not None}
        with self._lock:
            if (there := self.objects[kind].get(request.path_params["name"])) is None:
                return _status(404, "NotFound", "there is none of that name")
            changed = {**there, "status": {**there["status"], **status}}
            if problems := schema_problems(changed, {"pods": "V1Pod", "nodes": "V1Node"}[kind]):
                return _status(422, "Invalid", "; ".join(problems))
            there["status"] |= status
            return JSONResponse(there)

    async def _delete_node(self, request: Request) -> Response:
        if refused := self._refusal(request, "delete", "nodes"):
            return refused
        with self._lock:
            return JSONResponse(self.objects["nodes"].pop(request.path_params["name"]))

    def _refusal(self, request: Request, verb: str, resource: str, name: str = "") -> Response | None:
        match request.headers.get("authorization"):
            case "Bearer admin-token":
                return None
            case "Bearer controller-token":
                if self._allows(verb, resource, name, request.path_params.get("namespace", "")):
                    self.used.add((verb, resource))
                    return None
                return _status(403, "Forbidden", f'cannot {verb} resource "{resource}"')
        return _status(401, "Unauthorized", "Unauthorized")


def schema_problems(value: Any, kind: str, where: str = "") -> list[str]:
    """What is wrong with an object by the published schema: unknown fields, missing fields, wrong types."""
    if kind in ("object", "datetime") or value is None:
        return []
    if kind in ("str", "int", "bool", "float"):
        wanted = {"str": str, "int": int, "bool": bool, "float": float}[kind]
        fits = isinstance(value, wanted) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{where}: {value!r} is not of type {kind}"]
    if of := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [each for i, item in enumerate(value) for each in schema_problems(item, of[1], f"{where}[{i}]")]
    if of := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        if not isinstance(value, Mapping):
            return [f"{where}: not a mapping"]
        return [each for key, item in value.items() for each in schema_problems(item, of[1], f"{where}.{key}")]
    return _model_problems(value, kind, where)


def _model_problems(value: Any, kind: str, where: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{where}: not a {kind}"]
    model = getattr(models, kind)
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    problems = [f"{where}.{key}: unknown field of {kind}" for key in value if key not in names]
    for key in value.keys() & names.keys():
        problems += schema_problems(value[key], model.openapi_types[names[key]], f"{where}.{key}")
    try:
        model(**{names[key]: value[key] for key in value.keys() & names.keys()})
    except ValueError as error:  # The models know which fields are required.
        problems.append(f"{where}: {error}")
    return problems


def rules_allow(roles: Sequence[Json], verb: str, resource: str, name: str, namespace: str) -> bool:
    """Whether Role or ClusterRole manifests let their subject do this in the core API group."""
    there = [role for role in roles if role["metadata"].get("namespace", "") in ("", namespace)]
    rules = [rule for role in there for rule in role["rules"] if "" in rule["apiGroups"]]
    fitting = [rule for rule in rules if resource in rule["resources"] and verb in rule["verbs"]]
    return any("resourceNames" not in rule or name in rule["resourceNames"] for rule in fitting)


def _has_labels(made: Json, selector: str) -> bool:
    labels = made["metadata"].get("labels", {})
    wanted = (term.split("=") for term in selector.split(",") if term)
    return all(labels.get(name) == value for name, value in wanted)


def _status(code: int, reason: str, message: str) -> Response:
    return JSONResponse(
        {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}, code
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
