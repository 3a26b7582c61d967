# What the tests of installing share: an example outside of the tree, built against what was installed.
#   cmake -DBUILD=... -DSOURCE=... -DCXX=... -P install_test.cmake, which includes this file.

# Runs a command; the test fails with it, and says then what it said.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
endfunction()

# Installs the components (after the example's name) into the empty ${work}/prefix and builds the example there, as
# ${work}/build/EXAMPLE. Nothing of LibTorch may come with it.
function(build_installed work example)
  file(REMOVE_RECURSE "${work}")
  foreach(component ${ARGN})
    run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${work}/prefix" --component ${component})
  endforeach()
  # Only what was installed may be used: the example is built from a copy, with the prefix as its only way to Penstock.
  file(COPY "${SOURCE}/examples/${example}" DESTINATION "${work}")
  run(${CMAKE_COMMAND} -S "${work}/${example}" -B "${work}/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX}
      "-DCMAKE_PREFIX_PATH=${work}/prefix" -DCMAKE_CXX_FLAGS=-Wall\ -Wextra\ -Werror)
  run(${CMAKE_COMMAND} --build "${work}/build")
  execute_process(COMMAND ldd "${work}/build/${example}" OUTPUT_VARIABLE libraries)
  if(libraries MATCHES "libtorch|libc10")  # not "c10" alone: addresses have it now and then
    message(FATAL_ERROR "${ARGN}: LibTorch is dragged in: ${libraries}")
  endif()
endfunction()
