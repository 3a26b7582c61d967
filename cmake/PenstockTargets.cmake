# One function per kind of target, so that every room is declared the same way.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# What was compiled in one clone or build directory serves the others as well, precompiled headers among them.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros "${CCACHE_PROGRAM}")
endif()

add_library(penstock_options INTERFACE)
# These are for our own sources; whoever uses an installed library keeps to their own.
target_compile_options(penstock_options INTERFACE
  # Of sources that are compiled together, a name may hide a neighbour's.
  "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;$<$<NOT:$<BOOL:$<TARGET_PROPERTY:PENSTOCK_GROUPED>>>:-Wshadow>;-Wnon-virtual-dtor;-fno-math-errno>>"
  # One rounding per operation unless a kernel asks for a fused one: the same bits from every compiler flag.
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>>
  $<BUILD_INTERFACE:$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${PENSTOCK_WERROR}>>:-Werror>>)
target_compile_features(penstock_options INTERFACE cxx_std_20)
target_include_directories(penstock_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/penstock>)
if(PENSTOCK_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PENSTOCK_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${PENSTOCK_SANITIZE})
  if(PENSTOCK_SANITIZE MATCHES "undefined")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
  endif()
endif()

if(PENSTOCK_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()

# penstock_library(NAME aio SOURCES a.cc ... DEPS targets... [PRIVATE_DEPS targets...])
# declares library penstock_aio with the alias penstock::aio.
function(penstock_library)
  cmake_parse_arguments(ARG "" "NAME" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  set(target penstock_${ARG_NAME})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(penstock::${ARG_NAME} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${ARG_NAME})
  target_link_libraries(${target} PUBLIC penstock_options ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  cmake_language(EVAL CODE "cmake_language(DEFER CALL penstock_compile_in_groups ${target})")  # when all its sources are known
endfunction()

# Most of what a compiler works on is headers' code: sources that are compiled together share it. A class whose private part
# uses an anonymous namespace looks like one of a header then. Families are compiled alone: each names its parts as its
# siblings do. (CMake's own UNITY_BUILD writes whole paths into its files: they would be in the programs, and no cache
# would know them in another clone.)
function(penstock_compile_in_groups target)
  if(NOT PENSTOCK_UNITY OR target STREQUAL penstock_kernels)  # kernels: the same code whatever lies beside it
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(together ${sources})
  list(FILTER together INCLUDE REGEX "^[a-z].*\\.cc$")
  list(FILTER together EXCLUDE REGEX "(^|/)(gpt|llama)(_stages)?\\.cc$")
  list(REMOVE_ITEM sources ${together})
  file(RELATIVE_PATH room ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  set(most 32)  # of those that include LibTorch 8: a compiler takes 1.6 GB for them; and of tests
  if(target MATCHES "torch$|_tests$")
    set(most 8)
  endif()
  list(LENGTH together count)
  math(EXPR groups "(${count} + ${most} - 1) / ${most}")
  set(number 0)
  while(together)
    list(LENGTH together left)
    math(EXPR size "(${left} + ${groups} - ${number} - 1) / (${groups} - ${number})")
    list(SUBLIST together 0 ${size} group)
    list(REMOVE_ITEM together ${group})
    list(TRANSFORM group REPLACE "(.+)" "#include \"${room}/\\1\"\n")
    list(JOIN group "" includes)
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_${number}.cc)
    file(CONFIGURE OUTPUT ${file} CONTENT "${includes}" @ONLY)
    list(APPEND sources ${file})
    math(EXPR number "${number} + 1")
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${sources}" PENSTOCK_GROUPED ON)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

# With headers that are read once, GCC 12 finds in std::string what is not there (its bugs 105329 and 105651).
set(PENSTOCK_PRECOMPILED_OPTIONS
  $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread>)
# What most of the engine's sources include: read once, as penstock_zero_config has read it.
function(penstock_common_headers name)
  target_compile_options(penstock_${name} PRIVATE "${PENSTOCK_PRECOMPILED_OPTIONS}")
  if(name STREQUAL zero_config)
    target_precompile_headers(penstock_zero_config PRIVATE <algorithm> <functional> <map> <memory> <span> <string> <vector>
      <nlohmann/json.hpp> <absl/status/statusor.h> <absl/strings/str_cat.h>)
  else()
    target_precompile_headers(penstock_${name} REUSE_FROM penstock_zero_config)
  endif()
endfunction()

set(PENSTOCK_TORCH_HEADERS <torch/types.h> <torch/autograd.h> <torch/nn/module.h> <torch/utils.h>)
# Of the library penstock_<name> these sources include LibTorch's tensors, and share its headers as penstock_libtorch has
# read them: objects of their own, compiled as the library's. To its other sources, four seconds each would be lost. They
# call LibTorch, whose kernels take the time: they are optimized as far as keeps them quick to build.
function(penstock_torch_headers name)
  set(library penstock_${name})
  get_target_property(others ${library} SOURCES)
  list(REMOVE_ITEM others ${ARGN})
  if(name STREQUAL libtorch)
    target_compile_options(${library} PRIVATE $<$<CONFIG:Release>:-O1>)
    set_source_files_properties(${others} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    target_precompile_headers(${library} PRIVATE ${PENSTOCK_TORCH_HEADERS})
    return()
  endif()
  get_target_property(libraries ${library} LINK_LIBRARIES)
  add_library(${library}_torch OBJECT ${ARGN})
  target_link_libraries(${library}_torch PRIVATE ${libraries})
  target_compile_options(${library}_torch PRIVATE $<$<CONFIG:Release>:-O1>)
  target_precompile_headers(${library}_torch REUSE_FROM penstock_libtorch)
  cmake_language(EVAL CODE "cmake_language(DEFER CALL penstock_compile_in_groups ${library}_torch)")
  set_target_properties(${library} PROPERTIES SOURCES "${others};$<TARGET_OBJECTS:${library}_torch>")
endfunction()

# What `make test` builds: every test, and every program but the benchmarks, which no test starts.
add_custom_target(suite)

# penstock_program(NAME ds_io SOURCES ... DEPS ...): a program in <build>/bin.
function(penstock_program)
  cmake_parse_arguments(ARG "" "NAME" "SOURCES;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_link_libraries(${ARG_NAME} PRIVATE penstock_options ${ARG_DEPS})
  if(NOT ARG_DEPS MATCHES "benchmark::benchmark")
    add_dependencies(suite ${ARG_NAME})
  endif()
endfunction()

# What `make sanitize` builds and runs (ctest -L sanitize): the programs that handle files, bytes and memory by hand.
set(PENSTOCK_SANITIZE_JOB "^(aio|optim|swap)_|^base_(files|json|read_ahead)_test$|^tools_deepspeed_universal_test$|^zero_tensor_region_test$|^text_|^fuzz_(profile_json|safetensors_header|store_format|checkpoint_open|tokenizer_json|tokenizer_text)$")
add_custom_target(sanitize_job)
# A test program that is one of these belongs to that job.
function(penstock_note_for_sanitize_job target)
  if(target MATCHES "${PENSTOCK_SANITIZE_JOB}")
    add_dependencies(sanitize_job ${target})
    set_property(TEST ${target} APPEND PROPERTY LABELS sanitize)
  endif()
endfunction()

# Tests that take more than three seconds: `make check` leaves them out (ctest -LE slow), so that it takes a minute.
set(PENSTOCK_SLOW_TESTS
  aio_engine_test aio_loop_test aio_refusal_test kernels_on_fibers_test kernels_split_master_test optim_drive_optimizer_test
  swap_checkpoint_lock_test swap_kill_test swap_power_cut_test swap_sim_test tiering_adapters_test tiering_clipped_test
  tiering_device_plan_test tiering_device_state_test tiering_lower_bound_test tiering_plan_test tiering_large_models_test
  tiering_policy_test tiering_program_test tiering_sample_test tools_deepspeed_checkpoint_test tools_device_cli_test tools_export_over_another_test
  tools_ds_io_test tools_generate_cli_test tools_generate_device_test tools_generate_pass_test tools_generate_test
  tools_llama_golden_test tools_lora_base_test tools_lora_files_test tools_lora_test tools_pack_test tools_penstock_cgroup_test
  tools_penstock_cli_test tools_penstock_flags_test tools_penstock_full_disk_test tools_penstock_monitor_test
  tools_penstock_old_state_test tools_penstock_plan_test tools_penstock_replan_test tools_penstock_runs_test tools_penstock_store_test
  tools_penstock_text_test tools_penstock_watch_test tools_plan_model_test tools_ranks_cli_test tools_ranks_hosts_test
  run_config_property_test run_plan_bounds_test tools_recorded_config_test tools_vocabulary_tiles_test
  zero_abandon_test zero_calls_of_a_step_test
  zero_changing_buffers_kill_test zero_checkpointing_test zero_combinations_test
  zero_device_state_test zero_device_test zero_driven_compute_test zero_driven_device_test zero_driver_device_test zero_durability_test zero_engine_test zero_fault_test
  zero_gds_test zero_give_up_test zero_kill_test zero_measure_test zero_parameter_access_test
  zero_precision_test zero_rank_checkpoints_test zero_rank_devices_test zero_rank_state_test
  zero_ranks_test zero_recorded_json_test zero_replan_by_steps_test zero_replan_models_test zero_replan_test zero_tcp_ranks_test)

# How a test is compiled: what it tests is optimized as always, its own code only as far as keeps it quick to build. One
# that links LibTorch shares the headers that zero_test_support has read (-fPIC, as they were read with it).
function(penstock_test_options target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  foreach(dependency ${ARGN})
    if(dependency MATCHES "^(zero_test_support|penstock::(libtorch|models|generate_device|tools_verbs))$")
      target_compile_options(${target} PRIVATE -fPIC)
      target_precompile_headers(${target} REUSE_FROM zero_test_support)
      return()
    endif()
  endforeach()
endfunction()

# What ctest knows of a test program, or of one file of it: a name, labels, seconds, and whether it runs alone.
function(penstock_test_entry name)
  cmake_parse_arguments(ARG "SERIAL" "TIMEOUT" "LABELS" ${ARGN})
  add_test(NAME ${name} COMMAND "${PROJECT_BINARY_DIR}/tests/${name}" WORKING_DIRECTORY "${PROJECT_BINARY_DIR}")
  if("sanitize" IN_LIST ARG_LABELS)
    message(FATAL_ERROR "${name}: PENSTOCK_SANITIZE_JOB names what `make sanitize` builds and runs; a label alone builds nothing")
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)  # minutes more than any needs: the machine may be busy
  endif()
  if(name IN_LIST PENSTOCK_SLOW_TESTS)
    list(APPEND ARG_LABELS slow)
    set(cost 10)  # ctest starts these first, so that the last one to end is a short one
  else()
    set(cost 1)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} COST ${cost} LABELS "${ARG_LABELS}")
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
  if("gpu" IN_LIST ARG_LABELS)
    set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)  # each takes what memory is free there
  endif()
  penstock_note_for_sanitize_job(${name})
endfunction()

# penstock_test(NAME swap_store_test SOURCES ... DEPS ... [LABELS ...] [TIMEOUT s]): a GoogleTest program of its own, one ctest
# entry. For a file that cannot share a program with others: it replaces functions of the standard library, say.
function(penstock_test)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  add_dependencies(suite ${ARG_NAME})
  set_target_properties(${ARG_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(${ARG_NAME} PRIVATE penstock_options ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  penstock_test_options(${ARG_NAME} ${ARG_DEPS})
  penstock_test_entry(${ARG_NAME} TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABELS})
endfunction()

# penstock_tests(NAME swap_tests FILES kill sim ... DEPS ... [SOURCES ...] [LABELS ...] [TIMEOUT s] [SERIAL files]): one GoogleTest
# program of x_test.cc for every file x, with what they share in SOURCES. Most of what a compiler works on is headers' code: in
# groups they take two fifths of the time. Each file is a ctest entry and a target, swap_x_test, and tests/swap_x_test runs its tests
# alone (tests/main.cc). So that files have names of their own, the namespace of each ends in its name.
function(penstock_tests)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "FILES;SOURCES;DEPS;LABELS;SERIAL" ${ARGN})
  list(TRANSFORM ARG_FILES REPLACE "(.+)" "\\1_test.cc" OUTPUT_VARIABLE sources)
  add_executable(${ARG_NAME} ${ARG_SOURCES} ${sources})
  add_dependencies(suite ${ARG_NAME})
  set_target_properties(${ARG_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(${ARG_NAME} PRIVATE penstock_options penstock_test_main ${ARG_DEPS} GTest::gmock GTest::gtest)
  penstock_test_options(${ARG_NAME} ${ARG_DEPS})
  cmake_language(EVAL CODE "cmake_language(DEFER CALL penstock_compile_in_groups ${ARG_NAME})")
  string(REGEX MATCH "^[a-z]+" room "${ARG_NAME}")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  foreach(each ${ARG_FILES})
    set(name ${room}_${each}_test)
    file(CREATE_LINK ${ARG_NAME} "${PROJECT_BINARY_DIR}/tests/${name}" SYMBOLIC)
    add_custom_target(${name})
    add_dependencies(${name} ${ARG_NAME})
    set(serial "")
    if(each IN_LIST ARG_SERIAL)
      set(serial SERIAL)
    endif()
    penstock_test_entry(${name} TIMEOUT ${ARG_TIMEOUT} LABELS ${ARG_LABELS} ${serial})
  endforeach()
endfunction()
