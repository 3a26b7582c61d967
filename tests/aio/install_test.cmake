# Installs penstock::aio into an empty prefix, builds the example there against it, and has it copy a file.
#   cmake -DBUILD=... -DSOURCE=... -DCXX=... -P install_test.cmake
include("${CMAKE_CURRENT_LIST_DIR}/../installed.cmake")
set(work "${BUILD}/install-test")
build_installed("${work}" aio_copy core aio)
# A file of some MiB and a ragged end.
execute_process(COMMAND head -c 9876543 /dev/urandom OUTPUT_FILE "${work}/source")
run("${work}/build/aio_copy" "${work}/source" "${work}/target")
run(${CMAKE_COMMAND} -E compare_files "${work}/source" "${work}/target")
file(REMOVE_RECURSE "${work}")
