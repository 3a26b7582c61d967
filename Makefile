# The two commands are `make train` and `make test`; `make help` lists the rest.
PRESET  ?= release
BUILD   := build/$(PRESET)
JOBS    ?= $(shell nproc)

.PHONY: help train test build deps soak lint format clean asan ubsan tsan

help:
	@echo "make train   install what is missing, build, train a GPT whose state is several times its memory budget"
	@echo "make test    install what is missing, build, run the test suite"
	@echo "make build   install what is missing, build (PRESET=release|debug|asan|ubsan|tsan)"
	@echo "make soak    the kill and fault tests, SOAK=20 times as long;  make asan|ubsan|tsan  the suite under a sanitizer"
	@echo "make lint    clang-format and clang-tidy checks;  make format  rewrites in place"
	@echo "make clean   remove build/"

deps:
	@scripts/install-deps

build: deps
	@test -f $(BUILD)/build.ninja || cmake --preset $(PRESET)
	@cmake --build $(BUILD) -j $(JOBS)

test: build
	@cd $(BUILD) && ctest --output-on-failure -j $(JOBS)

train: build
	@scripts/train

asan ubsan tsan:
	@$(MAKE) --no-print-directory test PRESET=$@

# The kill loops and the fault campaign, SOAK times as long; each prints its seeds.
SOAK ?= 20
soak: build
	@cd $(BUILD) && for test in swap_kill_test swap_sim_test swap_checkpoint_test zero_kill_test; do \
	  PENSTOCK_SOAK=$(SOAK) tests/$$test || exit 1; done

lint:
	@scripts/lint

format:
	@git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf build
