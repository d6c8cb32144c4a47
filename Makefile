# Everything a newcomer needs: `make demo` and `make test`. Each target installs what it needs into this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
# Real agent trajectories, where they lie beside the checkout; else the project's own workload laws are used.
TRACE ?= $(firstword $(wildcard ../shared/traces/*.jsonl.gz))

# Tests start Heddle hundreds of times: it is compiled once, whatever a container's image says.
unexport PYTHONDONTWRITEBYTECODE

# Tests that need nothing that is large, or no machine of their own.
HERE := not vllm and not sglang and not npm and not ray and not quiet

# Where a test takes minutes, its name is printed when it begins.
BY_NAME := -vv --no-header

# Tests of real servers that start, end or reshape servers of their own.
FLEET := tests/real/test_local_vllm.py tests/real/test_real_controller.py

# What the tests need besides Heddle, and tests that would notice a dependency that is too old.
TEST_TOOLS := pytest|pytest-asyncio|pytest-timeout|pytest-xdist|anthropic|httpx|httpx2|hypothesis|jsonschema|PyYAML
NOTICING := tests/gateway/test_settings.py tests/gateway/test_http_bytes.py tests/gateway/test_streams.py \
	tests/gateway/test_anthropic.py tests/api/test_dashboard.py tests/api/test_streams_http.py \
	tests/api/test_tokens_of_turns.py tests/store/test_factory.py tests/store/test_redis.py tests/engines/test_http.py \
	tests/cli/test_arguments.py tests/simulator/test_command.py tests/predictor/test_tabular.py

.PHONY: help install demo test lint style types imports bytecode clients fleet nixl tier sleeping text train ray real sglang compiled lowest bench rivals soak fidelity results loop redis vllm clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo    a rollout on four simulated engines, with and without Heddle (two minutes)
demo: install
	$(BIN)/heddle demo

## make test    all tests, with a real Redis server
test: install lint redis bytecode
	REDIS_SERVER=$$(deploy/get-redis.sh) $(BIN)/python -m pytest -n 6 --dist worksteal -m "not alone and $(HERE)"
	REDIS_SERVER=$$(deploy/get-redis.sh) $(BIN)/python -m pytest -m "alone and $(HERE)" tests/engines tests/faults

## make real    the same on real vLLM without a GPU (installs 3.8 GB)
real: vllm
	$(BIN)/heddle real --venv $(VLLM_VENV) $(if $(TRACE),--trace $(TRACE))
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) tests/real tests/predictor $(FLEET:%=--ignore=%) \
		-m "vllm and not nixl and not tier and not sleeping and not quiet and not text and not train"

## make fleet   the controller reshapes a fleet of real vLLM servers during a rollout
fleet: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m "vllm and not tier" $(FLEET)

## make nixl    KV is fetched over NIXL between two real vLLM servers, one of them drained by hand
nixl: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m nixl tests/real

## make tier    KV is found in a folder that real vLLM servers share, when one is killed and when all are relaunched
tier: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m tier $(or $(TESTS),tests/real)

## make sleeping  a fleet of real vLLM servers is reshaped by sleep and wake
sleeping: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m sleeping tests/real

## make text    text predictors are trained with torch, and kept only if the text helps (a minute)
text: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m text tests/predictor

## make train   a GRPO trainer learns from agents on real vLLM servers, whose weights it updates (three minutes)
train: vllm
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m train tests/real

## make ray     the Ray launcher on a real cluster of two nodes on this machine (installs 240 MB)
ray: install
	deploy/install-packages.sh $(VENV) -c constraints.txt -e ".[dev,ray]"
	$(BIN)/python -m pytest -m ray tests/controller

## make sglang  the tests that need two SGLang servers, which you start: docs/gpu.md says how
sglang: install
	SGLANG_URLS="$(SGLANG_URLS)" SGLANG_MODEL="$(SGLANG_MODEL)" $(BIN)/python -m pytest $(BY_NAME) -m sglang tests/real

## make fidelity a rollout on real vLLM against its simulation; needs an idle machine
fidelity: install
	deploy/install-vllm-cpu.sh $(VLLM_VENV)
	VLLM_CPU_VENV=$(VLLM_VENV) $(BIN)/python -m pytest $(BY_NAME) -m quiet tests/real tests/controller

## make clients the tests that need Node.js: OpenAI's client, and the dashboard's page
clients: install
	deploy/get-node-clients.sh
	$(BIN)/python -m pytest -m npm tests/api

## make compiled Heddle as machine code in .venv-compiled, tested; needs a C compiler (five minutes)
compiled:
	PYTHON=$(PYTHON) deploy/compiled/make.sh .venv-compiled

## make lowest  a part of the tests with the oldest versions of its dependencies that Heddle allows (three minutes)
lowest: redis # uv only: pip knows no --resolution
	deploy/make-venv.sh .venv-lowest
	deploy/install-packages.sh .venv-lowest --resolution lowest-direct -e ".[export,kubernetes]" \
		$$(grep -E '^($(TEST_TOOLS))==' constraints.txt)
	REDIS_SERVER=$$(deploy/get-redis.sh) .venv-lowest/bin/python -m pytest -n 2 -m "not alone and $(HERE)" $(NOTICING)

## make bench   what the gateway costs beside routers and proxies; writes docs/results.md (quick: REPEATS=1 SECONDS=0.5)
bench: install
	deploy/get-bench-peers.sh
	$(BIN)/python -m loadtest.bench.run --write docs/results.md $(if $(SECTIONS),--sections $(SECTIONS)) \
		$(if $(ONLY),--only "$(ONLY)") $(if $(REPEATS),--repeats $(REPEATS)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(RESUME),--resume)

## make rivals  a rollout on real vLLM behind Heddle and behind vllm-router (two hours; RIVALS="--case binds --repeats 1")
rivals: vllm
	deploy/get-bench-peers.sh
	$(BIN)/python -m heddle.rivals --venv $(VLLM_VENV) $(RIVALS)

## make soak    a gateway under load: its memory, files and connections must not grow (ten minutes, or MINUTES=60)
soak: install
	$(BIN)/python -m loadtest.soak $(if $(MINUTES),--minutes $(MINUTES))

## make results every policy on every scenario, in virtual time; resumes; writes docs/results-simulated.md (BUDGET=60: an hour, .work/experiments)
results: install
	$(BIN)/python -m simulator.experiments $(if $(TRACE),--trace $(TRACE)) $(if $(BUDGET),--budget $(BUDGET)) \
		--write $(if $(BUDGET),.work/experiments/results.md,docs/results-simulated.md)

## make loop    64 simulated engines, gateway and controller: does reshaping a fleet gain what the simulator says? (half an hour)
loop: install
	$(BIN)/python -m heddle.loop $(LOOP)

lint: types style imports

style: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# One process compiles the tests and what they import, and tabulates Unicode for Hypothesis; else each of the six that
# run them does so at the same time.
bytecode: install
	@found=$$($(BIN)/python -m pytest --collect-only 2>&1) || { echo "$$found"; exit 1; }
	@$(BIN)/python -c "import anthropic, openai; from hypothesis import strategies; strategies.text().validate()"

redis:
	@deploy/get-redis.sh > /dev/null

vllm: install
	deploy/install-vllm-cpu.sh $(VLLM_VENV)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt deploy/make-venv.sh deploy/install-packages.sh
	deploy/make-venv.sh $(VENV)
	deploy/install-packages.sh $(VENV) -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-lowest .venv-compiled .work build *.egg-info
