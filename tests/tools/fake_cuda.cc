// Stand-ins for the functions of CUDA's runtime and of cuFile that ds_io uses, so that its way to a device is
// run where there is none. "Device memory" is anonymous memory that only these functions touch: the caller's
// pointer to it is off by kOffset, so that a program that used it as host memory would crash.
//
// FAKE_CUDA_FAULT names what fails: devices, malloc, register, copy, driver, handle, transfer.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/cufile_abi.h"

namespace {

constexpr uintptr_t kOffset = uintptr_t{1} << 56;  // no address of this program

bool Fails(const char* what) {
  const char* const fault = std::getenv("FAKE_CUDA_FAULT");
  return fault != nullptr && std::strcmp(fault, what) == 0;
}
bool IsDevice(const void* p) { return reinterpret_cast<uintptr_t>(p) >= kOffset; }
char* Real(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return reinterpret_cast<char*>(IsDevice(p) ? address - kOffset : address);
}

thread_local int current = 0;
constexpr size_t kHeader = 4096;  // before the memory: its length

}  // namespace

extern "C" {

int cudaGetDeviceCount(int* count) {
  *count = Fails("devices") ? 0 : 2;
  return Fails("devices") ? 100 : 0;
}
int cudaSetDevice(int device) {
  if (device >= 2) return 101;
  current = device;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = current;
  return 0;
}
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "said by the stand-in"; }
int cudaMalloc(void** memory, size_t bytes) {
  if (Fails("malloc")) return 2;
  void* const mapped =
      mmap(nullptr, bytes + kHeader, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 2;
  std::memcpy(mapped, &bytes, sizeof(bytes));
  *memory = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(mapped) + kHeader + kOffset);
  return 0;
}
int cudaFree(void* memory) {
  char* const mapped = Real(memory) - kHeader;
  size_t bytes = 0;
  std::memcpy(&bytes, mapped, sizeof(bytes));
  return munmap(mapped, bytes + kHeader);
}
int cudaHostRegister(void* memory, size_t, unsigned) { return IsDevice(memory) || Fails("register") ? 1 : 0; }
int cudaHostUnregister(void*) { return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void*) {
  if (Fails("copy")) return 700;
  // 1: host to device; 2: device to host.
  if (kind != (IsDevice(to) ? 1 : 2) || IsDevice(to) == IsDevice(from)) return 21;
  std::memcpy(Real(to), Real(from), bytes);
  return 0;
}
int cudaStreamCreateWithFlags(void** stream, unsigned) {
  static int stream_memory;
  *stream = &stream_memory;
  return 0;
}
int cudaStreamSynchronize(void*) { return 0; }
int cudaStreamDestroy(void*) { return 0; }

Error cuFileDriverOpen() { return {Fails("driver") ? 5001 : 0, 0}; }
Error cuFileDriverClose() { return {0, 0}; }
Error cuFileHandleRegister(void** handle, Descriptor* descriptor) {
  if (Fails("handle") || descriptor->type != 1) return {5030, 0};
  *handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor->fd));
  return {0, 0};
}
void cuFileHandleDeregister(void*) {}
Error cuFileBufRegister(const void* memory, size_t, int) { return {IsDevice(memory) ? 0 : 5011, 0}; }
Error cuFileBufDeregister(const void*) { return {0, 0}; }
ssize_t cuFileRead(void* handle, void* memory, size_t bytes, off_t file_offset, off_t memory_offset) {
  if (Fails("transfer") || !IsDevice(memory)) return -5008;
  return pread(static_cast<int>(reinterpret_cast<intptr_t>(handle)), Real(memory) + memory_offset, bytes,
               file_offset);
}
ssize_t cuFileWrite(void* handle, const void* memory, size_t bytes, off_t file_offset, off_t memory_offset) {
  if (Fails("transfer") || !IsDevice(memory)) return -5008;
  return pwrite(static_cast<int>(reinterpret_cast<intptr_t>(handle)), Real(memory) + memory_offset, bytes,
                file_offset);
}

}  // extern "C"
