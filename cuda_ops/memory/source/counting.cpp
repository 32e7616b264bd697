// An allocator for torch's tensors on the CPU that counts them, and refuses what goes beyond a limit.
//
// In front of every block lies a header that says how long it is.  A block of the allocator that was there before has
// none: it is known by the missing seal, and goes back to where it came from (libraries such as oneDNN keep plain
// pointers, and hand them to whatever allocator there is).  Counters are atomic, so the peak is exact.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#define HALOPIPE_CALL extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::size_t kHeaderBytes = c10::gAlignment;  // data behind it is aligned as torch has it
constexpr std::uint64_t kSeal = 0x68616c6f70697065;
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

struct Header {
  std::uint64_t seal;
  std::int64_t bytes;
};

std::atomic<std::int64_t> in_use{0}, peak{0}, limit{kNoLimit}, allocations{0}, refusals{0}, refused_bytes{0};
c10::Allocator* before = nullptr;

std::uint64_t seal_of(const void* data) { return kSeal ^ reinterpret_cast<std::uintptr_t>(data); }

Header* header_of(void* data) { return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes); }

void refuse(std::int64_t bytes, const std::string& why) {
  refused_bytes.store(bytes, std::memory_order_relaxed);
  refusals.fetch_add(1, std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().OutOfMemory(static_cast<std::size_t>(bytes));
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why);
}

void note_peak(std::int64_t now) {
  std::int64_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

// Adds to what is in use, unless that goes beyond the limit.
void take(std::int64_t bytes) {
  std::int64_t now = in_use.load(std::memory_order_relaxed);
  do {
    const std::int64_t most = limit.load(std::memory_order_relaxed);
    if (most != kNoLimit && bytes > most - now)
      refuse(bytes, "CPU out of memory: tried to allocate " + std::to_string(bytes) + " bytes; " +
                        std::to_string(now) + " of a limit of " + std::to_string(most) + " bytes are in use");
  } while (!in_use.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  note_peak(now + bytes);
  allocations.fetch_add(1, std::memory_order_relaxed);
}

void give_back(void* data) {
  if (data == nullptr) return;
  Header* header = header_of(data);
  if (header->seal != seal_of(data)) {
    before->raw_deallocate(data);
    return;
  }
  in_use.fetch_sub(header->bytes, std::memory_order_relaxed);
  header->seal = 0;
  c10::profiledCPUMemoryReporter().Delete(data);
  c10::free_cpu(header);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &give_back, cpu};
    const auto bytes = static_cast<std::int64_t>(size);
    take(bytes);
    void* block = nullptr;
    try {
      block = c10::alloc_cpu(size + kHeaderBytes);
    } catch (const c10::Error& error) {
      in_use.fetch_sub(bytes, std::memory_order_relaxed);
      refuse(bytes, std::string("CPU out of memory: ") + error.what_without_backtrace());
    }
    void* data = static_cast<char*>(block) + kHeaderBytes;
    *header_of(data) = {seal_of(data), bytes};
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &give_back, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

// Once in a process: tensors made from now on are counted.
HALOPIPE_CALL void halopipe_memory_install() {
  static Counting counting;
  if (before != nullptr) return;
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, std::numeric_limits<std::uint8_t>::max());
}

HALOPIPE_CALL int64_t halopipe_memory_in_use() { return in_use.load(std::memory_order_relaxed); }
HALOPIPE_CALL int64_t halopipe_memory_peak() { return peak.load(std::memory_order_relaxed); }
HALOPIPE_CALL int64_t halopipe_memory_allocations() { return allocations.load(std::memory_order_relaxed); }
HALOPIPE_CALL int64_t halopipe_memory_refusals() { return refusals.load(std::memory_order_relaxed); }
HALOPIPE_CALL int64_t halopipe_memory_refused() { return refused_bytes.load(std::memory_order_relaxed); }

// Memory that is no tensor's of this allocator, and yet held for one: so many bytes more, or fewer; never refused.
HALOPIPE_CALL void halopipe_memory_charge(int64_t bytes) {
  note_peak(in_use.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

// The peak starts again at what is in use.
HALOPIPE_CALL void halopipe_memory_reset_peak() { peak.store(in_use.load(std::memory_order_relaxed)); }

// Beyond so many bytes allocations fail; negative: no limit.
HALOPIPE_CALL void halopipe_memory_limit(int64_t bytes) { limit.store(bytes < 0 ? kNoLimit : bytes); }
