# The Python package in the normal build: its extension, and the part of its tests that belongs to `make test`, where a Python has
# torch, pytest and nanobind (scripts/install-deps python: Debian's torch). Elsewhere the test is skipped in words.
set(penstock_python "")
set(penstock_nanobind "${PROJECT_SOURCE_DIR}/build/python/nanobind")  # Debian 12 has none: PyPI's, put there
foreach(candidate python3 /usr/bin/python3)
  if(NOT penstock_python)
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=$ENV{PYTHONPATH}:${penstock_nanobind}" ${candidate} -c
              "import sys; from importlib.util import find_spec as s; print(sys.executable) if all(map(s, ('torch', 'pytest', 'nanobind'))) else sys.exit(1)"
      OUTPUT_VARIABLE penstock_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endforeach()
if(penstock_python)
  message(STATUS "Penstock: the Python package's tests with ${penstock_python}")
  set(Python_EXECUTABLE "${penstock_python}")
  if(EXISTS "${penstock_nanobind}/nanobind/cmake")
    set(nanobind_DIR "${penstock_nanobind}/nanobind/cmake")
  endif()
  add_subdirectory(python)
  add_dependencies(suite penstock_python penstock_python_stub)
else()
  message(STATUS "Penstock: without the Python package's tests: no Python has torch, pytest and nanobind (scripts/install-deps python)")
endif()
add_test(NAME python_package_test
         COMMAND "${PROJECT_SOURCE_DIR}/scripts/python-check" "${PROJECT_BINARY_DIR}/python" "${penstock_python}")
set_tests_properties(python_package_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 LABELS slow)
