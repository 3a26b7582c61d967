# `cmake --install` and, after it, `find_package(Penstock)`.
#
# Every room that was built is installed as penstock::<room>: a static library, its headers below include/penstock/<room>/
# (included as "aio/engine.h"), and an export file of its own, so that a room that is missing, or whose dependencies are,
# takes no other with it. Components carry the rooms' names; `core` holds what all of them need.
include(CMakePackageConfigHelpers)
set(penstock_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Penstock")

# In the order in which they depend on each other.
set(penstock_rooms options base kernels kernels_cuda aio optim swap tiering zero_config zero_memory zero_parts zero run libtorch)
set(penstock_installed "")
foreach(room ${penstock_rooms})
  if(NOT TARGET penstock_${room})
    continue()
  endif()
  set(component ${room})
  set(header_room ${room})
  if(room STREQUAL "options")
    set(component core)
    set(header_room "")
    set_target_properties(penstock_options PROPERTIES EXPORT_NAME options)
  elseif(room STREQUAL "base")
    set(component core)
  elseif(room STREQUAL "kernels_cuda")
    set(component kernels)
    set(header_room "")  # below kernels/, installed with it
  elseif(room STREQUAL "libtorch")
    set(header_room "zero/compute/libtorch")
  elseif(room MATCHES "^zero_")
    set(component zero)
    set(header_room "")
  endif()
  install(TARGETS penstock_${room} EXPORT Penstock-${room} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          COMPONENT ${component})
  install(EXPORT Penstock-${room} NAMESPACE penstock:: DESTINATION ${penstock_package_dir} COMPONENT ${component})
  if(header_room)
    install(DIRECTORY "${PROJECT_SOURCE_DIR}/${header_room}/" COMPONENT ${component}
            DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/penstock/${header_room}"
            FILES_MATCHING PATTERN "*.h" PATTERN "simd" EXCLUDE
            PATTERN "${header_room}/compute/libtorch" EXCLUDE)
  endif()
  list(APPEND penstock_installed ${room})
endforeach()

foreach(program penstock ds_io ds_nvme_tune ds_report)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  endif()
endforeach()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/PenstockConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/PenstockConfig.cmake" INSTALL_DESTINATION ${penstock_package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/PenstockConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/PenstockConfig.cmake" "${PROJECT_BINARY_DIR}/PenstockConfigVersion.cmake"
        DESTINATION ${penstock_package_dir} COMPONENT core)
