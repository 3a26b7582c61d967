# A wheel runs where Debian's libraries are not. liburing, libaio, xxHash, libdeflate, PCRE2 and utf8proc are linked from their static
# libraries where those are there. Abseil's cannot be: Debian's are not position independent (thread-local variables). It stays shared,
# and `make wheel` puts it into the wheel, as it does with whatever else stayed so.
foreach(pair "PkgConfig::uring;liburing.a" "PkgConfig::xxhash;libxxhash.a" "PkgConfig::libdeflate;libdeflate.a" "PkgConfig::pcre2;libpcre2-8.a"
             "PkgConfig::utf8proc;libutf8proc.a")
  list(GET pair 0 target)
  list(GET pair 1 name)
  find_library(penstock_static_${name} NAMES ${name})
  if(TARGET ${target} AND penstock_static_${name})
    set_target_properties(${target} PROPERTIES INTERFACE_LINK_LIBRARIES "${penstock_static_${name}}")
  endif()
endforeach()
find_library(penstock_static_libaio NAMES libaio.a)
if(penstock_static_libaio)
  set(LIBAIO_LIBRARY "${penstock_static_libaio}")
endif()
