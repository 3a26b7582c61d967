# Installs penstock::aio into an empty prefix, builds the example there against it, and has it copy a file.
#   cmake -DBUILD=... -DSOURCE=... -DCXX=... -P install_test.cmake
set(work "${BUILD}/install-test")
file(REMOVE_RECURSE "${work}")
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "failed (${result}): ${command}")
  endif()
endfunction()
foreach(component core aio)
  run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${work}/prefix" --component ${component})
endforeach()
# Only what was installed may be used: the example is built from a copy, with the prefix as its only way to Penstock.
file(COPY "${SOURCE}/examples/aio_copy" DESTINATION "${work}")
run(${CMAKE_COMMAND} -S "${work}/aio_copy" -B "${work}/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX}
    "-DCMAKE_PREFIX_PATH=${work}/prefix" -DCMAKE_CXX_FLAGS=-Wall\ -Wextra\ -Werror)
run(${CMAKE_COMMAND} --build "${work}/build")
execute_process(COMMAND ldd "${work}/build/aio_copy" OUTPUT_VARIABLE libraries)
if(libraries MATCHES "torch")
  message(FATAL_ERROR "penstock::aio drags LibTorch in: ${libraries}")
endif()
# A file of some MiB and a ragged end.
execute_process(COMMAND head -c 9876543 /dev/urandom OUTPUT_FILE "${work}/source")
run("${work}/build/aio_copy" "${work}/source" "${work}/target")
run(${CMAKE_COMMAND} -E compare_files "${work}/source" "${work}/target")
file(REMOVE_RECURSE "${work}")
