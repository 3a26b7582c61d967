# The two commands are `make train` and `make test`; `make help` lists the rest.
PRESET  ?= release
BUILD   := build/$(PRESET)
JOBS    ?= $(shell nproc)

.PHONY: bench-check classes deepspeed-parity suite wheel test-deps test-python help train test check build gpu deps soak sanitize fuzz docs lint format clean asan ubsan tsan

help:
	@echo "make train   install what is missing, build, train a GPT whose state is several times its memory budget"
	@echo "make test    install what is missing, build, run the test suite;  make check  its fast part, in a minute"
	@echo "make build   install what is missing, build (PRESET=release|debug|asan|ubsan|tsan)"
	@echo "make gpu     build for a CUDA device in build/gpu, with nvcc and a LibTorch from PyPI (PIP_LIBTORCH=DIR, 5 GiB)"
	@echo "make soak    the kill and fault tests, SOAK=20 times as long;  make asan|ubsan|tsan  the suite under a sanitizer"
	@echo "make bench-check  what judges time: I/O beside a bare loop, planning; for a quiet machine, no part of make test"
	@echo "make sanitize  I/O engine, store and what reads files, under ASan and UBSan, in minutes: part of every change's check"
	@echo "make fuzz    what reads files and flags, with clang's libFuzzer, FUZZ_SECONDS=120 each"
	@echo "make wheel   the Python package as wheels, in build/wheels (PYTHONS=\"python3.10 python3.12\");  make test-python  its tests"
	@echo "make classes  SAMPLE=250 of transformers' classes beside plain PyTorch, an hour: a table in build/classes.md"
	@echo "make deepspeed-parity  scripts and trainers under DeepSpeed itself and under Penstock, on the CPU: the same losses"
	@echo "make docs    a reference of the public headers, in build/docs/html (doxygen)"
	@echo "make lint    the order of the rooms, clang-format and clang-tidy checks;  make format  rewrites in place"
	@echo "make clean   remove build/"

deps:
	@scripts/install-deps

build: deps
	@test -f $(BUILD)/build.ninja || cmake --preset $(PRESET)
	@cmake --build $(BUILD) -j $(JOBS)

# The tests and what they start: without the benchmarks.
suite: deps
	@test -f $(BUILD)/build.ninja || cmake --preset $(PRESET)
	@cmake --build $(BUILD) -j $(JOBS) --target suite

# A LibTorch that has CUDA comes with pip, into a virtual environment; one that is there already is used as it is.
PIP_LIBTORCH ?= build/pip-libtorch
gpu: deps
	@scripts/pip-libtorch $(PIP_LIBTORCH)
	@cmake --build build/gpu -j $(JOBS)

# Without a network what needs these is skipped, in words.
test-deps: deps
	@scripts/install-deps tests || echo "make test: goes on without tests of file systems, network namespaces and pages in a browser" >&2
	@scripts/install-deps python || echo "make test: goes on without the Python package's tests" >&2

# Threads of tests that have nothing to do do not spin: several programs share the processors. (OpenBLAS starts a thread for each
# processor, which spins for 30 ms after every product; penstock sets their number anew.) One test more than there are processors runs
# at once, because many wait for the drive.
test: export OMP_WAIT_POLICY ?= passive
test: export OPENBLAS_NUM_THREADS ?= 1
test: test-deps suite
	@cd $(BUILD) && ctest --output-on-failure -j $$(($(JOBS) + 1))

# The tests that take seconds; what takes longer is labelled slow (tests/CMakeLists.txt).
check: suite
	@cd $(BUILD) && ctest --output-on-failure -j $(JOBS) -LE slow

# Only what it runs: the tests and the benchmarks are three quarters of a build.
train: deps
	@test -f build/release/build.ninja || cmake --preset release
	@cmake --build build/release -j $(JOBS) --target penstock
	@scripts/train

asan ubsan tsan:
	@$(MAKE) --no-print-directory test PRESET=$@

# What handles files, bytes and memory by hand, under two sanitizers at once, in a time that every change can afford.
sanitize: deps
	@test -f build/sanitize/build.ninja || cmake --preset sanitize
	@cmake --build build/sanitize -j $(JOBS) --target sanitize_job
	@cd build/sanitize && ctest --output-on-failure --no-tests=error -j $(JOBS) -L sanitize

# The kill loops and the fault campaign, SOAK times as long; each prints its seeds.
SOAK ?= 20
soak: suite
	@cd $(BUILD) && for test in swap_kill_test swap_power_cut_test swap_sim_test swap_one_version_test swap_checkpoint_test tiering_program_test \
	    tiering_device_plan_test tiering_lower_bound_test tiering_policy_test \
	    zero_abandon_test zero_changing_buffers_kill_test zero_combinations_test zero_device_state_test zero_durability_test zero_engine_test \
	    zero_fault_test zero_give_up_test zero_kill_test zero_rank_devices_test zero_ranks_test tools_export_over_another_test tools_pack_test; do \
	  filter=; test $$test != zero_ranks_test || filter='--gtest_filter=*Kill* --gtest_repeat=$(SOAK)'; \
	  test ! -x tests/$$test || PENSTOCK_SOAK=$(SOAK) tests/$$test $$filter || exit 1; done
	@cd $(BUILD) && test ! -x tests/faults_command_line_test || { for shard in $$(seq 0 $$(($(JOBS) - 1))); do \
	  PENSTOCK_SOAK=$(SOAK) GTEST_TOTAL_SHARDS=$(JOBS) GTEST_SHARD_INDEX=$$shard tests/faults_command_line_test & shards="$$shards $$!"; done; \
	  for shard in $$shards; do wait $$shard || failed=1; done; test -z "$$failed"; }

# What judges time: each prints its figures and its bars, and wants a quiet machine. Exit status 1 where one is missed.
bench-check: deps
	@test -f $(BUILD)/build.ninja || cmake --preset $(PRESET)
	@cmake --build $(BUILD) -j $(JOBS) --target bench_check
	@cd $(BUILD) && failed=; for bars in bars/*_bars; do $$bars --gtest_brief=1 || failed="$$failed $$bars"; done; \
	  python=$(CURDIR)/build/python/venv/bin/python; if ! test -x $$python; then echo "the front end in Python is not judged: make test-python installs it"; \
	  else mkdir -p python/tmp && $$python $(CURDIR)/bench/python_front_end.py python/tmp/front_end --most 1 || failed="$$failed front_end"; fi; \
	  test -z "$$failed" || { echo "bars missed:$$failed" >&2; exit 1; }

# Each target starts from its corpus; what it finds lies in build/fuzz/found afterwards.
FUZZ_SECONDS ?= 120
fuzz:
	@scripts/install-deps fuzz
	@test -f build/fuzz/build.ninja || cmake --preset fuzz
	@cmake --build build/fuzz -j $(JOBS) --target fuzz_targets
	@mkdir -p build/fuzz/found && cd build/fuzz/found && for target in ../tests/fuzz_*; do \
	  name=$${target##*/fuzz_}; echo "== $$name"; mkdir -p corpus-$$name; \
	  $$target -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=20 -rss_limit_mb=4096 -verbosity=0 -print_funcs=0 \
	    -print_final_stats=1 -artifact_prefix=$$name- corpus-$$name $(CURDIR)/tests/fuzz/corpus/$$name || exit 1; done

# Wheels of the Python package, one for each of PYTHONS, in build/wheels; what has no static library goes into them.
PYTHONS ?= python3
wheel:
	@scripts/install-deps wheel
	@scripts/python-wheel $(PYTHONS)

# The Python package's tests in a virtual environment with PyPI's torch, which all clones share (scripts/python-test).
test-python:
	@scripts/install-deps wheel
	@JOBS=$(JOBS) scripts/python-test

# The same scripts under DeepSpeed itself, on the CPU, and under Penstock: the same losses. Without a network it is skipped, in words.
deepspeed-parity:
	@scripts/install-deps wheel
	@JOBS=$(JOBS) scripts/deepspeed-parity

# Classes of transformers, drawn at random, beside plain PyTorch. What build/classes.jsonl has is not done again.
SAMPLE ?= 250
classes:
	@JOBS=$(JOBS) scripts/python-test --collect-only -q >/dev/null
	@build/python/venv/bin/python python/tests/transformers_sweep.py -j $(JOBS) --sample $(SAMPLE) --out build/classes.jsonl --table build/classes.md

# A reference of the public headers, in build/docs/html.
docs:
	@command -v doxygen >/dev/null || { echo "make docs: needs doxygen (Debian package doxygen)" >&2; exit 1; }
	@mkdir -p build && doxygen docs/Doxyfile

lint:
	@scripts/lint

format:
	@git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf build
