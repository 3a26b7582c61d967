// A small file system, ext4 unless told, on a loop device: for tests of sector sizes, full disks, devices
// that go away, and files that share their bytes. Needs root, loop devices and mkfs; where they are not there
// `skip()` says why.
#ifndef PENSTOCK_TESTS_AIO_LOOP_DEVICE_H_
#define PENSTOCK_TESTS_AIO_LOOP_DEVICE_H_

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace penstock::aio {

struct LoopOptions {
  std::string directory = ".";  // where the backing file lies
  std::string type = "ext4";    // or "xfs", "btrfs", which want 300 MiB and can clone files
  uint64_t bytes = 64 << 20;
  int sector_bytes = 512;
  // Not 0: the backing file is sparse on a tmpfs of this size, so that the device runs out of room before the
  // file system on it does, as thinly provisioned ones do.
  uint64_t backing_bytes = 0;
  // Of ext4. Without extents it cannot reserve space: files are sparse until they are written.
  bool extents = true;
  bool journal = true;  // takes 4 MiB and more
};

class LoopDevice {
 public:
  explicit LoopDevice(const LoopOptions& options) : type_(options.type) {
    std::string name = options.directory + "/loop-test-XXXXXX";
    if (geteuid() != 0) {
      skip_ = "needs root to set up a loop device";
      return;
    }
    if (mkdtemp(name.data()) == nullptr) {
      skip_ = "no scratch directory";
      return;
    }
    root_ = std::filesystem::absolute(name).string();
    std::filesystem::create_directory(root_ + "/backing");
    std::filesystem::create_directory(root_ + "/mnt");
    if (options.backing_bytes != 0) {
      const std::string size = "size=" + std::to_string(options.backing_bytes);
      thin_ = mount("tmpfs", (root_ + "/backing").c_str(), "tmpfs", 0, size.c_str()) == 0;
      if (!thin_) {
        skip_ = "tmpfs cannot be mounted here";
        return;
      }
    }
    const std::string image = backing_file();
    const int fd = open(image.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const bool made = fd >= 0 && ftruncate(fd, static_cast<off_t>(options.bytes)) == 0;
    if (fd >= 0) close(fd);
    if (made) {
      device_ =
          Output("losetup --find --show --sector-size " + std::to_string(options.sector_bytes) + " " + image);
    }
    if (device_.empty()) {
      skip_ = "losetup is not possible here";
      return;
    }
    std::string format = "mkfs." + type_ + " -q ";
    if (type_ == "ext4") format += "-b 4096 -m 0 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard ";
    if (!options.extents) format += "-O ^extent,^64bit ";
    if (!options.journal) format += "-O ^has_journal ";
    if (!Run(format + device_)) {
      skip_ = "mkfs." + type_ + " is not possible here";
      return;
    }
    Mount();
  }
  ~LoopDevice() {
    // The kernel lets go of files some time after a process that was in the middle of using them.
    for (int i = 0; !Unmount() && i < 200; ++i) usleep(10'000);
    if (!device_.empty()) Run("losetup --detach " + device_);
    if (thin_) umount2((root_ + "/backing").c_str(), MNT_DETACH);
    std::error_code ignored;
    if (!root_.empty()) std::filesystem::remove_all(root_, ignored);
  }
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;

  const std::string& skip() const { return skip_; }  // why there is none; empty: there is one
  std::string directory() const { return root_ + "/mnt"; }
  const std::string& device() const { return device_; }
  std::string backing_file() const { return root_ + "/backing/image"; }

  void Mount(unsigned long flags = 0) {
    mounted_ = mount(device_.c_str(), directory().c_str(), type_.c_str(), flags, nullptr) == 0;
    if (!mounted_) skip_ = type_ + " on " + device_ + " cannot be mounted";
  }
  // False while files are open on it.
  bool Unmount() {
    if (mounted_ && umount2(directory().c_str(), 0) != 0) return false;
    mounted_ = false;
    return true;
  }

  // Something else takes all the room that there is, as `directory()/filler`. False where it could not.
  bool Fill() const {
    const int fd = open((directory() + "/filler").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    const std::vector<char> bytes(1 << 20, 'x');
    bool full = false;
    for (size_t piece = bytes.size(); fd >= 0 && piece >= 512;) {
      if (write(fd, bytes.data(), piece) > 0) continue;
      full = errno == ENOSPC;
      piece /= 2;
    }
    if (fd >= 0) close(fd);
    return full;
  }
  void Free() const { unlink((directory() + "/filler").c_str()); }

  // From now on every operation on the file system fails with EIO, until it is mounted again: what pulling
  // the cable does. Nothing that is in memory is written any more. False where the kernel cannot.
  bool GoAway() {
    constexpr unsigned long kGoingDown = _IOR('X', 125, uint32_t);
    uint32_t without_flush = 2;
    const int fd = open(directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool done = fd >= 0 && ioctl(fd, kGoingDown, &without_flush) == 0;
    if (fd >= 0) close(fd);
    return done;
  }

  // Writes to the file system wait, and so do those to whatever is backed by a file on it, until it is
  // thawed. False where the kernel cannot.
  bool Freeze() const { return Tell(FIFREEZE); }
  void Thaw() const { Tell(FITHAW); }

  // The device behind `kept_bytes` is no longer there: reads of it fail with EIO.
  bool LoseTail(uint64_t kept_bytes) {
    return truncate(backing_file().c_str(), static_cast<off_t>(kept_bytes)) == 0;
  }

 private:
  bool Tell(unsigned long request) const {
    const int fd = open(directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool done = fd >= 0 && ioctl(fd, request, 0) == 0;
    if (fd >= 0) close(fd);
    return done;
  }
  static bool Run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }
  // The first line that the command prints; empty if it fails.
  static std::string Output(const std::string& command) {
    std::FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r");
    std::array<char, 256> line{};
    if (pipe == nullptr) return "";
    const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
    if (pclose(pipe) != 0 || !read) return "";
    const std::string text = line.data();
    return text.substr(0, text.find('\n'));
  }

  const std::string type_;
  std::string root_;
  std::string device_;
  std::string skip_;
  bool thin_ = false;
  bool mounted_ = false;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_TESTS_AIO_LOOP_DEVICE_H_
