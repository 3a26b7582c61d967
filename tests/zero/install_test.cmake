# Installs penstock::zero, without LibTorch, into an empty prefix, builds the hand-written model there against it, and
# trains it.
#   cmake -DBUILD=... -DSOURCE=... -DCXX=... -P install_test.cmake
include("${CMAKE_CURRENT_LIST_DIR}/../installed.cmake")
set(work "${BUILD}/zero-install-test")
build_installed("${work}" plain_model core kernels aio swap tiering zero)
if(EXISTS "${work}/prefix/include/penstock/zero/compute/libtorch")
  message(FATAL_ERROR "the component zero has LibTorch's headers")
endif()
run("${work}/build/plain_model" "${work}/state")
file(REMOVE_RECURSE "${work}")
