"""Compiles what takes part in every turn to machine code; laid beside pyproject.toml in a copy of the sources, never in
a checkout, where an extension module would stand before the source that somebody changes.
"""

from mypyc.build import mypycify
from setuptools import setup

# Modules by their folder. Left out are those
# - whose dataclasses are ever encoded (scheduling: types, limits, cost): orjson reads them by their memory, which in a
#   compiled class is another, and the process dies;
# - whose classes are asked for a class attribute (engines/vllm.py), or read for their annotations (msgspec's: compiled,
#   its structs have no fields);
# - with asynchronous generators, which mypyc does not support, and gateway/kv/moves.py, which it cannot read.
COMPILED = {
    "scheduling": "admission arrival chooser dispatcher engine estimate idle order placement prompts queues "
    "residency scheduler slot_search slowness state tool_calls transit",
    "predictor": "forecast groups lattice lengths pace tabular",
    "store": "embedded",
    "engines/http": "client connection outbox pool response",
    "gateway": "front metrics turnlog",
    "gateway/http": "access exchange heartbeat outlet protocol sse",
    "gateway/kv": "contexts",
    "gateway/messages": "answers beginnings conversations histories identity lazy_object normalised openings plain "
    "prompt_groups stream_contents streams text_only transcripts",
    "gateway/state": "driver ledger",
    "gateway/turns": "arrivals endings hot legs lending outcome progress relay repeats request_reader running turn "
    "turns",
    "gateway/workers": "pool wire worker",
}

files = [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()]
setup(ext_modules=mypycify(files, opt_level="2", debug_level="0"))
