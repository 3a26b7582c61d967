// A stand-in for NVIDIA's cuFile, beside that for its driver (fake_libcuda.cc), whose device's memory is the
// process's: a transfer goes to it as it is.
//
// FAKE_LIBCUFILE_FAULT=transfer: reads and writes fail.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/cufile_abi.h"

namespace {

bool Fails(const char* what) {
  const char* const fault = std::getenv("FAKE_LIBCUFILE_FAULT");
  return fault != nullptr && std::strcmp(fault, what) == 0;
}

int DescriptorOf(void* handle) { return static_cast<int>(reinterpret_cast<intptr_t>(handle)); }

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT Error cuFileDriverOpen() { return {0, 0}; }
EXPORT Error cuFileDriverClose() { return {0, 0}; }
EXPORT Error cuFileHandleRegister(void** handle, Descriptor* descriptor) {
  *handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor->fd));
  return {descriptor->type == 1 ? 0 : 5030, 0};
}
EXPORT void cuFileHandleDeregister(void*) {}
EXPORT Error cuFileBufRegister(const void*, size_t, int) { return {0, 0}; }
EXPORT Error cuFileBufDeregister(const void*) { return {0, 0}; }
EXPORT ssize_t cuFileRead(void* handle, void* memory, size_t bytes, off_t file_offset, off_t memory_offset) {
  if (Fails("transfer")) return -5008;
  return pread(DescriptorOf(handle), static_cast<char*>(memory) + memory_offset, bytes, file_offset);
}
EXPORT ssize_t cuFileWrite(void* handle, const void* memory, size_t bytes, off_t file_offset,
                           off_t memory_offset) {
  if (Fails("transfer")) return -5008;
  return pwrite(DescriptorOf(handle), static_cast<const char*>(memory) + memory_offset, bytes, file_offset);
}

}  // extern "C"
