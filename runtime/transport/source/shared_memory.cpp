// Messages between processes of one host through memory that they share.
//
// Every rank has one segment, an anonymous file that its peers map as well.  It begins with a control block: the bell
// by which the rank is woken, how many messages of each peer it has taken, and a ring of announcements for each peer.
// Behind it lie blocks.  A sender takes a block of its own segment, fills it, and announces it to a peer: on which
// channel, and where.  The receiver reads it where it lies and lets go of it; the last reader of a block puts it on the
// owner's list of blocks that came back.  Nothing is copied here, and no thread works in the background.
//
//     segment    | control: bell, taken[], ring[] | block | block | ...
//     ring       one writer, one reader; what does not fit waits with its writer
//     channel    a number; announcements from one rank on one channel come in order, channels overtake one another
//
// Whoever waits looks for a while without sleeping, then sleeps on the bell (a futex), and looks every 20 ms whether
// its peer's process still lives.  Addresses stay mapped until nobody looks at a block any more, also after a close.

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <type_traits>
#include <unordered_map>
#include <vector>

#define HALOPIPE_CALL extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::uint64_t kRingEntries = 512, kLine = 64, kPage = 4096;
constexpr std::uint64_t kWatched = 1ull << 63;  // a channel with this bit ends waits that watch
constexpr std::int64_t kPeerCheckNs = 20'000'000, kYieldNs = 20'000;
constexpr int kHere = 0, kLate = 1, kGone = 2, kOther = 3, kWrong = 4;

struct Entry {
  std::uint64_t channel, offset;
};

struct Ring {
  alignas(kLine) std::atomic<std::uint64_t> tail;  // of the writer
  alignas(kLine) std::atomic<std::uint64_t> head;  // of the reader
  alignas(kLine) Entry entries[kRingEntries];
};

struct Taken {
  alignas(kLine) std::atomic<std::uint64_t> count;
};

struct Control {
  std::uint8_t token[16];  // by which a peer knows that it has found the right file
  std::uint64_t world;
  alignas(kLine) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> asleep;
  std::atomic<std::uint32_t> closed;
  alignas(kLine) std::atomic<std::uint64_t> returned;  // the first of the blocks that came back, 0: none
};

struct Block {  // before the data
  std::atomic<std::uint64_t> next;
  std::atomic<std::int32_t> readers;
  std::uint32_t guard;  // of shape and dtype, as the caller likes
  std::uint64_t bytes;  // of the data
  std::uint64_t room;
  std::uint8_t rest[kLine - 32];
};
static_assert(sizeof(Block) == kLine, "data behind a block's head is aligned to a cache line");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics must work across processes");

std::uint64_t rounded(std::uint64_t number, std::uint64_t step) { return (number + step - 1) / step * step; }

std::uint64_t control_bytes(std::uint64_t world) {
  return rounded(sizeof(Control), kLine) + world * (sizeof(Taken) + sizeof(Ring));
}

struct Segment {
  char* base = nullptr;
  std::uint64_t size = 0, world = 0;

  Segment(int file, std::uint64_t bytes) : size(bytes) {
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (place == MAP_FAILED) return;
    base = static_cast<char*>(place);
    madvise(base, bytes, MADV_DONTDUMP);
    madvise(base, bytes, MADV_HUGEPAGE);
  }
  Segment(const Segment&) = delete;
  ~Segment() {
    if (base != nullptr) munmap(base, size);
  }

  Control* control() const { return reinterpret_cast<Control*>(base); }
  Taken* taken(int rank) const {
    return reinterpret_cast<Taken*>(base + rounded(sizeof(Control), kLine)) + rank;
  }
  Ring* ring(int rank) const {
    return reinterpret_cast<Ring*>(base + rounded(sizeof(Control), kLine) + world * sizeof(Taken)) + rank;
  }
  Block* block(std::uint64_t offset) const { return reinterpret_cast<Block*>(base + offset - sizeof(Block)); }
};

struct Peer {
  std::shared_ptr<Segment> segment;
  std::unordered_map<std::uint64_t, std::deque<std::uint64_t>> arrived;  // by channel
  std::deque<Entry> backlog;                                             // announced when there is room in the ring
  int process = -1;                                                      // a file that is readable once it has ended
  std::int64_t asked_ns = 0;                                             // when it was last asked whether it lives
  bool has_ended = false;
};

struct Context {
  int rank, world, file;
  std::uint64_t top;  // of the segment: behind it nothing was ever used
  std::vector<Peer> peers;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> free;  // by room, the last used first
  std::uint64_t watched = 0;  // announcements on watched channels so far
  std::int64_t looked_ns = 0;  // in which waits found nothing, and did not sleep
  std::atomic<std::int64_t> viewed{0};

  Segment& own() { return *peers[rank].segment; }
};

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void ring_bell(Control* control) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (control->asleep.load(std::memory_order_relaxed) == 0) return;
  control->bell.fetch_add(1, std::memory_order_relaxed);
  syscall(SYS_futex, &control->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Blocks come in eight sizes for every power of two, so that the next one of nearly the same size takes the same place.
std::uint64_t room_for(std::uint64_t bytes) {
  const std::uint64_t needed = rounded(bytes > 0 ? bytes : 1, kLine);
  const int power = 63 - __builtin_clzll(needed);
  const std::uint64_t step = power > 9 ? 1ull << (power - 3) : kLine;
  return rounded(needed, step);
}

// The last reader puts the block on its owner's list; only the owner takes from it, all at once.
void let_go(Segment& owner, std::uint64_t offset) {
  Block* block = owner.block(offset);
  if (block->readers.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::atomic<std::uint64_t>& first = owner.control()->returned;
  std::uint64_t before = first.load(std::memory_order_relaxed);
  do {
    block->next.store(before, std::memory_order_relaxed);
  } while (!first.compare_exchange_weak(before, offset, std::memory_order_release, std::memory_order_relaxed));
}

void take_back(Context& context) {
  std::uint64_t offset = context.own().control()->returned.exchange(0, std::memory_order_acquire);
  while (offset != 0) {
    Block* block = context.own().block(offset);
    const std::uint64_t next = block->next.load(std::memory_order_relaxed);
    context.free[block->room].push_back(offset);
    offset = next;
  }
}

void announce_backlog(Context& context) {
  for (int rank = 0; rank < context.world; ++rank) {
    Peer& peer = context.peers[rank];
    if (peer.backlog.empty()) continue;
    Ring* ring = context.own().ring(rank);
    std::uint64_t tail = ring->tail.load(std::memory_order_relaxed);
    while (!peer.backlog.empty() && tail - ring->head.load(std::memory_order_acquire) < kRingEntries) {
      ring->entries[tail++ % kRingEntries] = peer.backlog.front();
      peer.backlog.pop_front();
    }
    ring->tail.store(tail, std::memory_order_release);
    ring_bell(peer.segment->control());
  }
}

// What has been announced to this rank, sorted by channel.
void look(Context& context) {
  for (int rank = 0; rank < context.world; ++rank) {
    Peer& peer = context.peers[rank];
    if (rank == context.rank || peer.segment == nullptr) continue;
    Ring* ring = peer.segment->ring(context.rank);
    const std::uint64_t tail = ring->tail.load(std::memory_order_acquire);
    std::uint64_t head = ring->head.load(std::memory_order_relaxed);
    if (head == tail) continue;
    const bool was_full = tail - head == kRingEntries;
    for (; head != tail; ++head) {
      const Entry& entry = ring->entries[head % kRingEntries];
      peer.arrived[entry.channel].push_back(entry.offset);
      context.watched += (entry.channel & kWatched) != 0;
    }
    ring->head.store(head, std::memory_order_release);
    if (was_full) ring_bell(peer.segment->control());
  }
}

// Its process is asked after at most every `kPeerCheckNs`: that takes a system call.
bool has_left(Peer& peer) {
  if (peer.segment == nullptr || peer.has_ended) return true;
  if (peer.segment->control()->closed.load(std::memory_order_acquire) != 0) return true;
  const std::int64_t now = now_ns();
  if (now - peer.asked_ns < kPeerCheckNs) return false;
  peer.asked_ns = now;
  pollfd asked{peer.process, POLLIN, 0};
  if (peer.process >= 0 && poll(&asked, 1, 0) > 0) peer.has_ended = true;
  return peer.has_ended;
}

bool take(Peer& peer, std::uint64_t channel, std::uint64_t* offset) {
  const auto found = peer.arrived.find(channel);
  if (found == peer.arrived.end()) return false;
  *offset = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) peer.arrived.erase(found);
  return true;
}

// Waits until `found()`, for at most `limit_ns`, of which the first `spin_ns` awake (negative: it only looks once); or,
// if `seen` is not null, until watched channels have had others than the `*seen` that the caller knows, which is then
// what there were.
template <typename Found>
int wait(Context& context, Peer& peer, std::int64_t limit_ns, std::int64_t spin_ns, std::uint64_t* seen, Found found) {
  int ended = kLate;
  const auto ready = [&] {
    announce_backlog(context);
    look(context);
    const bool is_other = seen != nullptr && *seen != context.watched;
    if (seen != nullptr) *seen = context.watched;
    ended = found() ? kHere : is_other ? kOther : kLate;
    return ended != kLate;
  };
  if (ready()) return ended;
  if (limit_ns < 0) return kLate;
  const std::int64_t start = now_ns();
  std::int64_t now = start, yielded = start;
  bool is_found = false;
  while (!is_found && now - start < spin_ns && now - start < limit_ns) {
    for (int turn = 0; turn < 32 && !is_found; ++turn) {
      relax();
      is_found = ready();
    }
    now = now_ns();
    if (!is_found && now - yielded > kYieldNs) {  // other threads of this process, such as its heartbeat, want to run
      sched_yield();
      yielded = now = now_ns();
    }
  }
  context.looked_ns += now - start;
  if (is_found) return ended;
  Control* control = context.own().control();
  while (true) {
    const bool left = has_left(peer);  // asked first: what came before it left counts
    const std::uint32_t bell = control->bell.load(std::memory_order_relaxed);
    control->asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool is_ready = ready();
    const std::int64_t remaining = limit_ns - (now_ns() - start);
    if (!is_ready && !left && remaining > 0) {
      const std::int64_t nap = remaining < kPeerCheckNs ? remaining : kPeerCheckNs;
      const timespec time{nap / 1'000'000'000, nap % 1'000'000'000};
      syscall(SYS_futex, &control->bell, FUTEX_WAIT, bell, &time, nullptr, 0);
    }
    control->asleep.store(0, std::memory_order_relaxed);
    if (is_ready || ready()) return ended;
    if (left) return kGone;
    if (remaining <= 0) return kLate;
  }
}

// Tells `rank` that another of its messages was taken.
void took(Context& context, int rank) {
  context.own().taken(rank)->count.fetch_add(1, std::memory_order_release);
  ring_bell(context.peers[rank].segment->control());
}

// As in dlpack.h (DLPack 0.8).
struct Tensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

constexpr int kMostDims = 16;

// What lies in a block: from its `start` on, elements of a type as DLPack has them, the last dim first in memory.
struct Shape {
  std::int64_t start, code, bits, dims;
  std::int64_t extents[kMostDims];
};

struct View {
  Tensor tensor;
  void* manager;
  void (*deleter)(View*);
  std::int64_t shape[kMostDims], strides[kMostDims];
  std::shared_ptr<Segment> owner;
  std::uint64_t offset;
  std::int64_t bytes;
  void (*charge)(std::int64_t);
};

void drop(View* view) {
  if (view->charge != nullptr) view->charge(-view->bytes);
  let_go(*view->owner, view->offset);
  delete view;
}

View* view_of(const std::shared_ptr<Segment>& segment, std::uint64_t offset, const Shape& shape,
              void (*charge)(std::int64_t)) {
  auto* view = new View{};
  std::int64_t stride = 1;
  for (std::int64_t dim = shape.dims - 1; dim >= 0; --dim) {
    view->shape[dim] = shape.extents[dim];
    view->strides[dim] = stride;
    stride *= shape.extents[dim];
  }
  view->tensor = {segment->base + offset + shape.start,
                  1,
                  0,
                  static_cast<std::int32_t>(shape.dims),
                  static_cast<std::uint8_t>(shape.code),
                  static_cast<std::uint8_t>(shape.bits),
                  1,
                  view->shape,
                  view->strides,
                  0};
  view->deleter = &drop;
  view->owner = segment;
  view->offset = offset;
  view->bytes = static_cast<std::int64_t>(segment->block(offset)->bytes);
  view->charge = charge;
  if (charge != nullptr) charge(view->bytes);
  return view;
}

}  // namespace

// The segment of `rank`; null, with errno, where it cannot be had.
HALOPIPE_CALL void* halopipe_shared_open(std::int32_t rank, std::int32_t world, std::uint64_t bytes,
                                         const std::uint8_t* token) {
  const int file = static_cast<int>(syscall(SYS_memfd_create, "halopipe", 1u));  // closed on exec
  if (file < 0) return nullptr;
  bytes = rounded(bytes + control_bytes(world), kPage);
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return nullptr;
  }
  auto segment = std::make_shared<Segment>(file, bytes);
  if (segment->base == nullptr) {
    close(file);
    return nullptr;
  }
  auto* context = new Context{rank, world, file, rounded(control_bytes(world), kPage), {}, {}, 0, {}};
  context->peers.resize(world);
  segment->world = world;
  segment->control()->world = world;
  std::memcpy(segment->control()->token, token, sizeof(Control::token));
  context->peers[rank].segment = segment;
  return context;
}

// The number of the segment's file in this process, by which peers open it.
HALOPIPE_CALL std::int32_t halopipe_shared_file(Context* context) { return context->file; }

// Maps the segment of `rank`, which is `file` of process `process`; 0, or why not as errno.
HALOPIPE_CALL std::int32_t halopipe_shared_attach(Context* context, std::int32_t rank, std::int32_t process,
                                                  std::int32_t file, const std::uint8_t* token) {
  const int ended = static_cast<int>(syscall(SYS_pidfd_open, process, 0u));
  if (ended < 0) return errno;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", process, file);
  struct stat found {};
  const int opened = open(path, O_RDWR | O_CLOEXEC);
  int fault = opened < 0 || fstat(opened, &found) != 0 ? errno : 0;
  if (fault == 0) {
    auto segment = std::make_shared<Segment>(opened, static_cast<std::uint64_t>(found.st_size));
    segment->world = context->world;
    if (segment->base == nullptr) {
      fault = errno;
    } else if (std::memcmp(segment->control()->token, token, sizeof(Control::token)) != 0 ||
               segment->control()->world != static_cast<std::uint64_t>(context->world)) {
      fault = ESTALE;  // another process of that number, in another container
    } else {
      context->peers[rank].segment = segment;
      context->peers[rank].process = ended;
    }
  }
  if (opened >= 0) close(opened);
  if (fault != 0) close(ended);
  return fault;
}

// Where the data of a block of so many bytes lies in this rank's segment, for so many readers; 0: the segment is full.
HALOPIPE_CALL std::uint64_t halopipe_shared_block(Context* context, std::uint64_t bytes, std::int32_t readers,
                                                  std::uint32_t guard) {
  const std::uint64_t room = room_for(bytes);
  std::vector<std::uint64_t>& known = context->free[room];
  if (known.empty()) take_back(*context);
  std::uint64_t offset;
  if (!known.empty()) {
    offset = known.back();
    known.pop_back();
  } else {
    const std::uint64_t end = context->top + sizeof(Block) + room;
    if (end > context->own().size) return 0;
    offset = context->top + sizeof(Block);
    context->top = end;
  }
  Block* block = context->own().block(offset);
  block->readers.store(readers, std::memory_order_relaxed);
  block->guard = guard;
  block->bytes = bytes;
  block->room = room;
  return offset;
}

// Announces the block at `offset` (0: nothing but the announcement) to `rank`.
HALOPIPE_CALL void halopipe_shared_announce(Context* context, std::int32_t rank, std::uint64_t channel,
                                            std::uint64_t offset) {
  context->peers[rank].backlog.push_back({channel, offset});
  announce_backlog(*context);
}

// Copies so many bytes into a new block and announces it to one rank; 0: the segment is full.
HALOPIPE_CALL std::uint64_t halopipe_shared_put(Context* context, std::int32_t rank, std::uint64_t channel,
                                                const void* from, std::uint64_t bytes, std::uint32_t guard) {
  const std::uint64_t offset = halopipe_shared_block(context, bytes, 1, guard);
  if (offset == 0) return 0;
  std::memcpy(context->own().base + offset, from, bytes);
  halopipe_shared_announce(context, rank, channel, offset);
  return offset;
}

// As `halopipe_shared_put` of `rows` stretches of `row_bytes`, which begin `pitch` bytes after one another: a halo is cut
// out of a tensor so, and is packed where it is sent from.
HALOPIPE_CALL std::uint64_t halopipe_shared_put_rows(Context* context, std::int32_t rank, std::uint64_t channel,
                                                     const void* from, std::uint64_t rows, std::uint64_t row_bytes,
                                                     std::uint64_t pitch, std::uint32_t guard) {
  const std::uint64_t offset = halopipe_shared_block(context, rows * row_bytes, 1, guard);
  if (offset == 0) return 0;
  char* to = context->own().base + offset;
  const char* source = static_cast<const char*>(from);
  const auto copy = [&](auto length) {
    for (std::uint64_t row = 0; row < rows; ++row, to += length, source += pitch) std::memcpy(to, source, length);
  };
  // Of one number a row, as of a column, the length is known when this is compiled: a load and a store.
  if (row_bytes == 4) {
    copy(std::integral_constant<std::uint64_t, 4>{});
  } else if (row_bytes == 8) {
    copy(std::integral_constant<std::uint64_t, 8>{});
  } else {
    copy(row_bytes);
  }
  halopipe_shared_announce(context, rank, channel, offset);
  return offset;
}

// As `halopipe_shared_put` of a message of one tensor: its header, which is a line, and what follows, in one block.
// Nothing is done, and 1 returned, if the rank has left.
HALOPIPE_CALL std::uint64_t halopipe_shared_post(Context* context, std::int32_t rank, std::uint64_t channel,
                                                 const void* header, const void* from, std::uint64_t bytes) {
  if (has_left(context->peers[rank])) return 1;
  const std::uint64_t offset = halopipe_shared_block(context, kLine + bytes, 1, 0);
  if (offset == 0) return 0;
  std::memcpy(context->own().base + offset, header, kLine);
  std::memcpy(context->own().base + offset + kLine, from, bytes);
  halopipe_shared_announce(context, rank, channel, offset);
  return offset;
}

// Waits for the next announcement of `rank` on `channel`: 0 it is here, 1 too late, 2 the rank has left, and 3, if
// `seen` is not null, that watched channels have had others than the `*seen` that the caller knows.
HALOPIPE_CALL std::int32_t halopipe_shared_wait(Context* context, std::int32_t rank, std::uint64_t channel,
                                                std::int64_t limit_ns, std::int64_t spin_ns, std::uint64_t* offset,
                                                std::uint64_t* seen) {
  Peer& peer = context->peers[rank];
  return wait(*context, peer, limit_ns, spin_ns, seen, [&] { return take(peer, channel, offset); });
}

// As `halopipe_shared_wait`; what lies in the block is copied to `to`, and the block let go of.  4: it has another size
// or guard, and is left for the caller to look at, who finds it at `*offset`.
HALOPIPE_CALL std::int32_t halopipe_shared_fetch(Context* context, std::int32_t rank, std::uint64_t channel, void* to,
                                                 std::uint64_t bytes, std::uint32_t guard, std::int64_t limit_ns,
                                                 std::int64_t spin_ns, std::uint64_t* offset, std::uint64_t* seen) {
  const int ended = halopipe_shared_wait(context, rank, channel, limit_ns, spin_ns, offset, seen);
  if (ended != kHere) return ended;
  Segment& segment = *context->peers[rank].segment;
  const Block* block = segment.block(*offset);
  if (block->bytes != bytes || block->guard != guard) return kWrong;
  std::memcpy(to, segment.base + *offset, bytes);
  let_go(segment, *offset);
  return kHere;
}

// As `halopipe_shared_wait`, for a message that begins with `header`, a line; `rank` is told that one more of its messages
// was taken.  `*view` is a DLManagedTensor of what `shape` describes: who has it is a reader of the block until it is
// deleted, which any thread may do.  4: it begins otherwise, and is left for the caller to look at, who finds it at
// `*offset`.  `charge`, if there is one, is told the block's bytes, and their negative when the view is deleted.
HALOPIPE_CALL std::int32_t halopipe_shared_receive(Context* context, std::int32_t rank, std::uint64_t channel,
                                                   const void* header, const Shape* shape, std::int64_t limit_ns,
                                                   std::int64_t spin_ns, std::uint64_t* offset, std::uint64_t* seen,
                                                   View** view, void (*charge)(std::int64_t)) {
  const int ended = halopipe_shared_wait(context, rank, channel, limit_ns, spin_ns, offset, seen);
  if (ended != kHere) return ended;
  took(*context, rank);
  const std::shared_ptr<Segment>& segment = context->peers[rank].segment;
  if (std::memcmp(segment->base + *offset, header, kLine) != 0) return kWrong;
  *view = view_of(segment, *offset, *shape, charge);
  return kHere;
}

// What `halopipe_shared_wait` finds without waiting: whether there is an announcement.
HALOPIPE_CALL std::int32_t halopipe_shared_poll(Context* context, std::int32_t rank, std::uint64_t channel,
                                                std::uint64_t* offset) {
  announce_backlog(*context);
  look(*context);
  return take(context->peers[rank], channel, offset) ? 1 : 0;
}

HALOPIPE_CALL std::uint64_t halopipe_shared_taken(Context* context, std::int32_t rank) {
  Segment* segment = context->peers[rank].segment.get();
  return segment == nullptr ? 0 : segment->taken(context->rank)->count.load(std::memory_order_acquire);
}

// Waits until `rank` has taken `count` messages of this one; as `halopipe_shared_wait`.
HALOPIPE_CALL std::int32_t halopipe_shared_wait_taken(Context* context, std::int32_t rank, std::uint64_t count,
                                                      std::int64_t limit_ns, std::int64_t spin_ns,
                                                      std::uint64_t* seen) {
  return wait(*context, context->peers[rank], limit_ns, spin_ns, seen,
              [&] { return halopipe_shared_taken(context, rank) >= count; });
}

// Whether `rank` has closed or ended.
HALOPIPE_CALL std::int32_t halopipe_shared_has_left(Context* context, std::int32_t rank) {
  return has_left(context->peers[rank]) ? 1 : 0;
}

HALOPIPE_CALL std::uint64_t halopipe_shared_bytes(Context* context, std::int32_t owner, std::uint64_t offset) {
  return context->peers[owner].segment->block(offset)->bytes;
}

HALOPIPE_CALL std::uint32_t halopipe_shared_guard(Context* context, std::int32_t owner, std::uint64_t offset) {
  return context->peers[owner].segment->block(offset)->guard;
}

// One reader fewer.
HALOPIPE_CALL void halopipe_shared_let_go(Context* context, std::int32_t owner, std::uint64_t offset) {
  let_go(*context->peers[owner].segment, offset);
}

HALOPIPE_CALL void* halopipe_shared_base(Context* context, std::int32_t owner) {
  Segment* segment = context->peers[owner].segment.get();
  return segment == nullptr ? nullptr : segment->base;
}

HALOPIPE_CALL std::uint64_t halopipe_shared_size(Context* context, std::int32_t owner) {
  return context->peers[owner].segment->size;
}

// How much of this rank's segment was ever used.
HALOPIPE_CALL std::uint64_t halopipe_shared_top(Context* context) { return context->top; }

// How long waits of this rank have looked without finding what they waited for, awake.
HALOPIPE_CALL std::int64_t halopipe_shared_looked(Context* context) { return context->looked_ns; }

// Peers that wait for this rank learn that nothing comes any more.
HALOPIPE_CALL void halopipe_shared_close(Context* context) {
  announce_backlog(*context);
  context->own().control()->closed.store(1, std::memory_order_release);
  for (int rank = 0; rank < context->world; ++rank)
    if (rank != context->rank && context->peers[rank].segment != nullptr)
      ring_bell(context->peers[rank].segment->control());
}

// The end; blocks that somebody still looks at stay where they are.
HALOPIPE_CALL void halopipe_shared_free(Context* context) {
  for (Peer& peer : context->peers)
    if (peer.process >= 0) close(peer.process);
  close(context->file);
  delete context;
}
