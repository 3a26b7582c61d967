#include "aio/cufile.h"

#include <sys/types.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/loaded_library.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

// The few numbers and structures of cuFile's interface that are needed; they are part of its ABI.
struct Error {
  int error = 0;  // 0: done
  int cuda_error = 0;
};
struct Descriptor {
  int type = 1;  // a file descriptor
  union {
    int fd;
    void* handle = nullptr;
  };
  const void* operations = nullptr;
};

LoadedLibrary Library() { return LoadedLibrary({"libcufile.so", "libcufile.so.0"}); }

}  // namespace

struct CuFile::Functions {
  Error (*DriverOpen)() = nullptr;
  Error (*DriverClose)() = nullptr;
  Error (*HandleRegister)(void**, Descriptor*) = nullptr;
  void (*HandleDeregister)(void*) = nullptr;
  Error (*BufRegister)(const void*, size_t, int) = nullptr;
  Error (*BufDeregister)(const void*) = nullptr;
  ssize_t (*Read)(void*, void*, size_t, off_t, off_t) = nullptr;
  ssize_t (*Write)(void*, const void*, size_t, off_t, off_t) = nullptr;
};

CuFile::CuFile() : call_(std::make_unique<Functions>()) {}

bool CuFile::IsInstalled() { return Library().loaded(); }

absl::StatusOr<std::shared_ptr<CuFile>> CuFile::Load(std::function<absl::Status()> use_device,
                                                     bool only_past_host) {
  const LoadedLibrary library = Library();
  if (!library.loaded()) return absl::FailedPreconditionError("no libcufile.so on this machine");
  auto made = std::shared_ptr<CuFile>(new CuFile());
  made->use_device_ = std::move(use_device);
  Functions& call = *made->call_;
  std::string missing;
  library.Find("cuFileDriverOpen", call.DriverOpen, missing);
  library.Find("cuFileDriverClose", call.DriverClose, missing);
  library.Find("cuFileHandleRegister", call.HandleRegister, missing);
  library.Find("cuFileHandleDeregister", call.HandleDeregister, missing);
  library.Find("cuFileBufRegister", call.BufRegister, missing);
  library.Find("cuFileBufDeregister", call.BufDeregister, missing);
  library.Find("cuFileRead", call.Read, missing);
  library.Find("cuFileWrite", call.Write, missing);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("libcufile.so here has no ", missing));
  }
  RETURN_IF_ERROR(made->use_device_());
  if (only_past_host) setenv("CUFILE_ALLOW_COMPAT_MODE", "false", /*overwrite=*/0);
  if (const Error opened = call.DriverOpen(); opened.error != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cuFileDriverOpen gave error ", opened.error));
  }
  made->open_ = true;
  return made;
}

CuFile::~CuFile() {
  if (!open_) return;
  (void)use_device_();
  Cover(nullptr, 0);
  for (const auto& [fd, handle] : handles_) call_->HandleDeregister(handle);
  call_->DriverClose();
}

void CuFile::Cover(std::byte* base, uint64_t bytes) {
  if (registered_) call_->BufDeregister(this->base());
  DeviceTransfers::Cover(base, bytes);
  // Where it cannot be registered, cuFile goes through buffers of its own.
  registered_ = base != nullptr && call_->BufRegister(base, bytes, 0).error == 0;
}

void* CuFile::HandleOf(const File& file, std::string* why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto there = handles_.find(file.fd()); there != handles_.end()) return there->second;
  Descriptor descriptor;
  descriptor.fd = file.fd();
  void* handle = nullptr;
  if (const Error error = call_->HandleRegister(&handle, &descriptor); error.error != 0) {
    *why = absl::StrCat(file.path(), " cannot be used with cuFile (error ", error.error, ")");
    return nullptr;
  }
  handles_[file.fd()] = handle;
  return handle;
}

int64_t CuFile::Transfer(Op op, const File& file, uint64_t offset, void* data, uint64_t bytes,
                         std::string* why) {
  if (absl::Status status = use_device_(); !status.ok()) {
    *why = std::string(status.message());
    return -EIO;
  }
  void* const handle = HandleOf(file, why);
  if (handle == nullptr) return -EOPNOTSUPP;
  const auto in_file = static_cast<off_t>(offset);
  // Offsets count from what is registered; other memory is named itself.
  void* const from = registered_ ? base() : static_cast<std::byte*>(data);
  const auto in_memory = static_cast<off_t>(static_cast<std::byte*>(data) - static_cast<std::byte*>(from));
  const bool read = op == Op::kRead;
  errno = 0;
  const ssize_t moved = read ? call_->Read(handle, from, bytes, in_file, in_memory)
                             : call_->Write(handle, from, bytes, in_file, in_memory);
  if (moved >= 0) return moved;
  if (moved == -1) return errno != 0 ? -errno : -EIO;
  *why = absl::StrCat(read ? "cuFileRead " : "cuFileWrite ", file.path(), ": offset ", offset, ", ", bytes,
                      " bytes: cuFile error ", -moved);
  return -EIO;
}

void CuFile::Forget(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto there = handles_.find(fd);
  if (there == handles_.end()) return;
  (void)use_device_();
  call_->HandleDeregister(there->second);
  handles_.erase(there);
}

}  // namespace penstock::aio
