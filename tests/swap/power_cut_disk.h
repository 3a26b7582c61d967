// A disk whose power can be cut: an ext4 on a loop device, over a file whose bytes are in this process
// (FUSE). What the device gets is a log: a write is in the disk's cache until the next flush, and at a cut
// every 4 KiB sector that was not flushed holds, at random, what it held at the last flush or any of the
// writes since. Flushes are honoured, as by a drive that tells the truth. What is written after the cut is
// lost, and fails.
//
//   PowerCutDisk disk(seed);
//   if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
//   ... processes work in disk.directory(), and may be killed: the cache does not mind ...
//   disk.CutAfter(30);                      // writes of the device from now on
//   while (!disk.off()) ...;  ... end all who have files open there ...
//   ASSERT_TRUE(disk.PowerOn());            // mounted again, journal replayed
//
// Needs root, /dev/fuse, loop devices and mkfs.ext4; where they are not there `skip()` says why.
#ifndef PENSTOCK_TESTS_SWAP_POWER_CUT_DISK_H_
#define PENSTOCK_TESTS_SWAP_POWER_CUT_DISK_H_

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/fuse.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace penstock::swap {

class PowerCutDisk {
 public:
  explicit PowerCutDisk(uint64_t seed) : random_(seed), durable_(kBytes) {
    if (geteuid() != 0) {
      skip_ = "needs root to mount a file system";
      return;
    }
    char name[] = "power-cut-XXXXXX";
    if (mkdtemp(name) == nullptr) {
      skip_ = "no scratch directory";
      return;
    }
    root_ = std::filesystem::absolute(name).string();
    std::filesystem::create_directory(root_ + "/device");
    std::filesystem::create_directory(root_ + "/mnt");
    fuse_ = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    const std::string options = "fd=" + std::to_string(fuse_) + ",rootmode=40000,user_id=0,group_id=0";
    served_ = fuse_ >= 0 && mount("power-cut", (root_ + "/device").c_str(), "fuse", MS_NOSUID | MS_NODEV,
                                  options.c_str()) == 0;
    if (!served_) {
      skip_ = "a FUSE file system cannot be mounted here";
      return;
    }
    thread_ = std::thread([this] { Serve(); });
    device_ = Output("losetup --find --show " + root_ + "/device/image");
    if (device_.empty()) {
      skip_ = "losetup is not possible here";
      return;
    }
    if (std::system(("mkfs.ext4 -q -b 4096 -m 0 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard " +
                     device_ + " >/dev/null 2>&1")
                        .c_str()) != 0) {
      skip_ = "mkfs.ext4 is not possible here";
      return;
    }
    if (!Mount()) skip_ = "ext4 on " + device_ + " cannot be mounted";
  }
  ~PowerCutDisk() {
    Unmount();
    if (!device_.empty()) (void)Output("losetup --detach " + device_);
    if (served_) umount2((root_ + "/device").c_str(), MNT_DETACH);
    if (thread_.joinable()) thread_.join();
    if (fuse_ >= 0) close(fuse_);
    std::error_code ignored;
    if (!root_.empty()) std::filesystem::remove_all(root_, ignored);
  }
  PowerCutDisk(const PowerCutDisk&) = delete;
  PowerCutDisk& operator=(const PowerCutDisk&) = delete;

  const std::string& skip() const { return skip_; }  // why there is none; empty: there is one
  std::string directory() const { return root_ + "/mnt"; }

  // Everything that was written so far is on the disk, as some seconds later by itself.
  bool SyncFileSystem() const {
    const int fd = open(directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool done = fd >= 0 && syncfs(fd) == 0;
    if (fd >= 0) close(fd);
    return done;
  }

  // The power fails in the midst of the n-th write from now on, n at least 1.
  void CutAfter(uint64_t writes) {
    const std::lock_guard lock(mutex_);
    left_ = writes;
  }
  bool off() {
    const std::lock_guard lock(mutex_);
    return off_;
  }
  // Cuts the power if it is still on, and gives it back. False: the file system could not be mounted again,
  // or somebody still had files open.
  bool PowerOn() {
    {
      const std::lock_guard lock(mutex_);
      off_ = true;
    }
    if (!Unmount()) return false;
    // Whoever looks at all devices just now (losetup, blkid) keeps the kernel's cache of this one alive,
    // which is of before the cut.
    if (const int fd = open(device_.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
      (void)ioctl(fd, BLKFLSBUF, 0);
      close(fd);
    }
    {
      const std::lock_guard lock(mutex_);
      ++cuts_;
      // Caches that had written back almost nothing, half, or almost everything.
      const double kept = std::array{0.1, 0.5, 0.9}[random_() % 3];
      for (const auto& [sector, versions] : cache_) {
        if (std::uniform_real_distribution<>()(random_) >= kept) {
          ++lost_sectors_;
          continue;
        }
        const std::vector<char>& survivor =
            random_() % 4 == 0 ? versions[random_() % versions.size()] : versions.back();
        std::memcpy(&durable_[sector * kSector], survivor.data(), kSector);
      }
      cache_.clear();
      left_ = 0;
      off_ = false;
    }
    return Mount();
  }
  uint64_t cuts() const { return cuts_; }
  uint64_t lost_sectors() const { return lost_sectors_; }

 private:
  static constexpr uint64_t kBytes = uint64_t{64} << 20;
  static constexpr uint64_t kSector = 4096;
  static constexpr uint32_t kMaxWrite = 128 << 10;
  static constexpr uint64_t kImage = 2;  // node of the only file

  bool Mount() {
    mounted_ = mount(device_.c_str(), directory().c_str(), "ext4", 0, nullptr) == 0;
    return mounted_;
  }
  // The kernel may still end the requests of those who were killed.
  bool Unmount() {
    for (int i = 0; mounted_ && i < 2000; ++i) {
      if (umount2(directory().c_str(), 0) == 0) mounted_ = false;
      if (mounted_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return !mounted_;
  }
  // The first line that the command prints; empty if it fails.
  static std::string Output(const std::string& command) {
    std::FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "re");
    std::array<char, 256> line{};
    if (pipe == nullptr) return "";
    const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
    if (pclose(pipe) != 0 || !read) return "";
    const std::string text = line.data();
    return text.substr(0, text.find('\n'));
  }

  // ---- the device, on its own thread

  void Serve() {
    std::vector<char> request(kMaxWrite + 8192);
    while (true) {
      const ssize_t n = read(fuse_, request.data(), request.size());
      if (n < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN)) continue;
      if (n < static_cast<ssize_t>(sizeof(fuse_in_header))) return;  // unmounted
      fuse_in_header in;
      std::memcpy(&in, request.data(), sizeof in);
      Answer(in, request.data() + sizeof in);
    }
  }

  template <typename Out>
  void Reply(uint64_t unique, const Out& out) {
    Send(unique, 0, &out, sizeof out);
  }
  void Send(uint64_t unique, int error, const void* data = nullptr, size_t bytes = 0) {
    fuse_out_header header{static_cast<uint32_t>(sizeof(fuse_out_header) + bytes), -error, unique};
    iovec parts[] = {{&header, sizeof header}, {const_cast<void*>(data), bytes}};
    (void)!writev(fuse_, parts, 2);
  }
  static fuse_attr AttrOf(uint64_t node) {
    fuse_attr attr{};
    attr.ino = node;
    attr.mode = node == kImage ? S_IFREG | 0600 : S_IFDIR | 0700;
    attr.size = node == kImage ? kBytes : 0;
    attr.blocks = attr.size / 512;
    attr.nlink = 1;
    attr.blksize = kSector;
    return attr;
  }

  void Answer(const fuse_in_header& in, const char* body) {
    switch (in.opcode) {
      case FUSE_INIT: {
        fuse_init_out out{};
        out.major = FUSE_KERNEL_VERSION;
        out.minor = FUSE_KERNEL_MINOR_VERSION;
        out.flags = FUSE_BIG_WRITES;
        out.max_background = 16;
        out.congestion_threshold = 12;
        out.max_write = kMaxWrite;
        out.time_gran = 1;
        return Reply(in.unique, out);
      }
      case FUSE_LOOKUP: {
        if (std::strcmp(body, "image") != 0) return Send(in.unique, ENOENT);
        fuse_entry_out out{};
        out.nodeid = kImage;
        out.entry_valid = out.attr_valid = 3600;
        out.attr = AttrOf(kImage);
        return Reply(in.unique, out);
      }
      case FUSE_GETATTR:
      case FUSE_SETATTR: {
        fuse_attr_out out{};
        out.attr_valid = 3600;
        out.attr = AttrOf(in.nodeid);
        return Reply(in.unique, out);
      }
      case FUSE_OPEN:
      case FUSE_OPENDIR: {
        fuse_open_out out{};
        out.open_flags = in.opcode == FUSE_OPEN ? FOPEN_DIRECT_IO : 0;
        return Reply(in.unique, out);
      }
      case FUSE_READ: {
        fuse_read_in read_in;
        std::memcpy(&read_in, body, sizeof read_in);
        return Read(in.unique, read_in.offset, read_in.size);
      }
      case FUSE_WRITE: {
        fuse_write_in write_in;
        std::memcpy(&write_in, body, sizeof write_in);
        return Write(in.unique, write_in.offset, body + sizeof write_in, write_in.size);
      }
      case FUSE_FSYNC:
        return Flush(in.unique);
      case FUSE_STATFS:
        return Reply(in.unique, fuse_statfs_out{});
      case FUSE_FLUSH:
      case FUSE_RELEASE:
      case FUSE_RELEASEDIR:
        return Send(in.unique, 0);
      case FUSE_FORGET:
      case FUSE_BATCH_FORGET:
      case FUSE_INTERRUPT:
        return;  // have no answer
      default:
        return Send(in.unique, ENOSYS);
    }
  }

  const char* Newest(uint64_t sector) const {
    const auto cached = cache_.find(sector);
    return cached == cache_.end() ? &durable_[sector * kSector] : cached->second.back().data();
  }
  // Runs `each(sector, offset within it, offset within the transfer, bytes)`.
  template <typename F>
  static void BySector(uint64_t offset, uint64_t bytes, F each) {
    for (uint64_t done = 0; done < bytes;) {
      const uint64_t at = offset + done, within = at % kSector,
                     run = std::min(bytes - done, kSector - within);
      each(at / kSector, within, done, run);
      done += run;
    }
  }

  void Read(uint64_t unique, uint64_t offset, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (off_) return Send(unique, EIO);
    std::vector<char> out(offset >= kBytes ? 0 : std::min(bytes, kBytes - offset));
    BySector(offset, out.size(), [&](uint64_t sector, uint64_t within, uint64_t done, uint64_t run) {
      std::memcpy(&out[done], Newest(sector) + within, run);
    });
    Send(unique, 0, out.data(), out.size());
  }

  void Write(uint64_t unique, uint64_t offset, const char* data, uint32_t bytes) {
    const std::lock_guard lock(mutex_);
    if (off_ || offset + bytes > kBytes) return Send(unique, off_ ? EIO : ENOSPC);
    BySector(offset, bytes, [&](uint64_t sector, uint64_t within, uint64_t done, uint64_t run) {
      const char* before = Newest(sector);
      std::vector<char> content(before, before + kSector);
      std::memcpy(&content[within], data + done, run);
      cache_[sector].push_back(std::move(content));
    });
    if (left_ > 0 && --left_ == 0) {
      off_ = true;
      return Send(unique, EIO);
    }
    fuse_write_out out{};
    out.size = bytes;
    Reply(unique, out);
  }

  void Flush(uint64_t unique) {
    const std::lock_guard lock(mutex_);
    if (off_) return Send(unique, EIO);
    for (const auto& [sector, versions] : cache_)
      std::memcpy(&durable_[sector * kSector], versions.back().data(), kSector);
    cache_.clear();
    Send(unique, 0);
  }

  std::mt19937_64 random_;
  std::string root_;
  std::string device_;
  std::string skip_;
  int fuse_ = -1;
  bool served_ = false;
  bool mounted_ = false;
  std::thread thread_;

  std::mutex mutex_;
  std::vector<char> durable_;
  std::map<uint64_t, std::vector<std::vector<char>>>
      cache_;          // sector -> what it was to hold since the last flush
  uint64_t left_ = 0;  // writes until the cut; 0: none is planned
  bool off_ = false;
  uint64_t cuts_ = 0;
  uint64_t lost_sectors_ = 0;
};

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_POWER_CUT_DISK_H_
