#include "vmm_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace vmm {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Regions that are never copied use large chunks: mapping costs about the same for every chunk, whatever its size.
constexpr size_t kDroppedChunk = size_t{4} << 30;
constexpr unsigned kPinThreads = 8;
constexpr unsigned kPortable = 1, kNonBlocking = 1, kNoTiming = 2;
constexpr int kPinnedType = 1, kDeviceType = 1, kReadWrite = 3, kMinimum = 0;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Fault the pages in, as huge pages if the kernel provides them: the driver then pins 1 page instead of 512.
bool populate(char* host, size_t bytes) {
  if (madvise(host, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  for (size_t i = 0; i < bytes; i += 4096) host[i] = 0;  // an older kernel
  return true;
}

// Return host addresses aligned to a huge page, or null. Child processes do not inherit them: the kernel would copy
// pinned pages.
char* map_host(size_t bytes) {
  const size_t mapped = bytes + kHugePage;
  void* map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(map);
  char* const arena = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(begin), kHugePage));
  if (arena > begin) munmap(begin, arena - begin);
  if (arena + bytes < begin + mapped) munmap(arena + bytes, begin + mapped - arena - bytes);
  madvise(arena, bytes, MADV_HUGEPAGE);
  madvise(arena, bytes, MADV_DONTFORK);
  return arena;
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

// PyTorch's context is current only in PyTorch's own threads.
class Pool::Context {
 public:
  explicit Context(const Pool& pool) : driver_(pool.driver_) {
    pool.check(driver_.push_context(pool.context_), "cuCtxPushCurrent", "");
  }
  ~Context() {
    void* context;
    driver_.pop_context(&context);
  }

 private:
  const Driver& driver_;
};

Pool::Pool(const Driver& driver, int device, size_t chunk_bytes) : driver_(driver), device_(device) {
  properties_.type = kPinnedType;
  properties_.location = {kDeviceType, device};
  check(driver_.primary_context(&context_, device), "cuDevicePrimaryCtxRetain", "");
  Context context(*this);
  check(driver_.granularity(&granularity_, &properties_, kMinimum), "cuMemGetAllocationGranularity", "");
  granularity_ = std::max(granularity_, kHugePage);  // so that host copies of chunks begin at huge pages
  chunk_bytes_ = round_up(chunk_bytes, granularity_);
  check(driver_.create_stream(&stream_out_, kNonBlocking), "cuStreamCreate", "");
  check(driver_.create_stream(&stream_in_, kNonBlocking), "cuStreamCreate", "");
}

Pool::~Pool() {
  for (auto& [tag, region] : regions_)
    for (auto& [address, block] : region.blocks) discard(block);
  for (size_t i = 0; i < units_.size(); ++i) {
    if (is_pinned_[i]) driver_.unregister_host(units_[i].host);
    munmap(units_[i].host, units_[i].bytes);
  }
}

void Pool::check(CUresult result, const char* call, const std::string& tag) const {
  if (result == kSuccess) return;
  auto where = tag.empty() ? std::string() : "region " + tag + ": ";
  throw Failure(Status::kDriver, where + call + " returned CUDA error " + std::to_string(result));
}

Pool::Region& Pool::find(const std::string& tag, const char* action) {
  auto found = regions_.find(tag);
  if (found == regions_.end()) throw Failure(Status::kState, std::string(action) + ": there is no region " + tag);
  return found->second;
}

Pool::Region& Pool::find(const std::string& tag, const char* action, bool resident) {
  Region& region = find(tag, action);
  if (region.resident == resident) return region;
  throw Failure(Status::kState,
                std::string(action) + ": region " + tag + (resident ? " is released" : " is resident already"));
}

void Pool::open(const std::string& tag, Policy policy) {
  std::lock_guard lock(mutex_);
  auto [place, is_new] = regions_.try_emplace(tag);
  Region& region = place->second;
  if (is_new) {
    region.tag = tag;
    region.policy = policy;
  }
  if (region.policy != policy) throw Failure(Status::kState, "region " + tag + " has another policy");
  find(tag, "allocate", true);
}

Address Pool::allocate(const std::string& tag, size_t bytes) {
  std::lock_guard lock(mutex_);
  Context context(*this);
  Region& region = find(tag, "allocate", true);
  Block block;
  block.bytes = round_up(bytes, granularity_);
  check(driver_.reserve(&block.address, block.bytes, granularity_, 0, 0), "cuMemAddressReserve", tag);
  const size_t unit = region.policy == Policy::kDrop ? kDroppedChunk : chunk_bytes_;
  for (size_t at = 0; at < block.bytes; at += unit) {
    Chunk chunk;
    chunk.address = block.address + at;
    chunk.bytes = std::min(unit, block.bytes - at);
    block.chunks.push_back(chunk);
  }
  try {
    for (Chunk& chunk : block.chunks) map(chunk, region, block.bytes);
  } catch (...) {
    discard(block);
    throw;
  }
  region.has_copy = false;
  owners_[block.address] = &region;
  return region.blocks.emplace(block.address, std::move(block)).first->first;
}

void Pool::free(Address address) {
  std::lock_guard lock(mutex_);
  auto owner = owners_.find(address);
  if (owner == owners_.end()) throw Failure(Status::kState, "free: the address is not of this pool");
  Context context(*this);
  auto block = owner->second->blocks.find(address);
  driver_.synchronize();  // unmapping under a kernel that still reads would fault
  if (block->second.chunks[0].is_reserved) {
    std::lock_guard reserve_lock(reserve_mutex_);
    reserve_.taken -= block->second.bytes;
    if (reserve_.taken == 0) next_ = 0;  // all of it is for another run of this process
  }
  discard(block->second);
  owner->second->blocks.erase(block);
  owners_.erase(owner);
}

void Pool::map(Chunk& chunk, const Region& region, size_t wanted) {
  Handle handle = 0;
  CUresult result = driver_.create(&handle, chunk.bytes, &properties_, 0);
  if (result == kDriverOutOfMemory) {
    size_t free = 0, total = 0;
    driver_.memory_info(&free, &total);
    throw Failure(Status::kOutOfMemory, "region " + region.tag, wanted, free);
  }
  check(result, "cuMemCreate", region.tag);
  result = driver_.map(chunk.address, chunk.bytes, 0, handle, 0);
  if (result != kSuccess) driver_.release(handle);
  check(result, "cuMemMap", region.tag);
  chunk.handle = handle;
  Access access{{kDeviceType, device_}, kReadWrite};
  check(driver_.set_access(chunk.address, chunk.bytes, &access, 1), "cuMemSetAccess", region.tag);
}

void Pool::unmap(Chunk& chunk, const std::string& tag) {
  check(driver_.unmap(chunk.address, chunk.bytes), "cuMemUnmap", tag);
  Handle handle = std::exchange(chunk.handle, 0);
  check(driver_.release(handle), "cuMemRelease", tag);
}

// Errors are ignored: the block is being destroyed, at exit possibly after the driver is.
void Pool::discard(Block& block) noexcept {
  for (Chunk& chunk : block.chunks) {
    if (chunk.handle && driver_.unmap(chunk.address, chunk.bytes) == kSuccess) driver_.release(chunk.handle);
    if (chunk.copied) driver_.destroy_event(chunk.copied);
    if (!chunk.host || chunk.is_reserved) continue;
    driver_.unregister_host(chunk.host);
    munmap(chunk.host, chunk.bytes);
  }
  driver_.free_address(block.address, block.bytes);
}

std::vector<Pool::Chunk*> Pool::chunks(Region* region) {
  std::vector<Chunk*> all;
  if (!region) return all;
  for (auto& [address, block] : region->blocks)
    for (Chunk& chunk : block.chunks) all.push_back(&chunk);
  return all;
}

size_t Pool::size(const std::vector<Chunk*>& chunks) {
  size_t bytes = 0;
  for (const Chunk* chunk : chunks) bytes += chunk->bytes;
  return bytes;
}

// Assign host memory to every chunk, contiguous within a block: from the reserve, or from one pinned arena.
void Pool::pin(Region& region) {
  std::vector<Chunk*> missing;
  for (auto& [address, block] : region.blocks) {
    if (block.chunks[0].host || take_reserve(block, region.tag)) continue;
    for (Chunk& chunk : block.chunks) missing.push_back(&chunk);
  }
  if (missing.empty()) return;
  const size_t bytes = size(missing);
  char* const arena = map_host(bytes);
  if (!arena)
    throw Failure(Status::kHostOutOfMemory,
                  "region " + region.tag + ": no " + std::to_string(bytes) + " bytes of host memory");
  char* next = arena;
  for (Chunk* chunk : missing) chunk->host = std::exchange(next, next + chunk->bytes);
  std::string problem = pin_chunks(missing, [](size_t) {});
  if (problem.empty()) return;
  for (Chunk* chunk : missing) {
    driver_.unregister_host(chunk->host);  // an error for those that were not
    chunk->host = nullptr;
  }
  munmap(arena, bytes);
  throw Failure(Status::kHostOutOfMemory,
                "region " + region.tag + ": pinning " + std::to_string(bytes) + " bytes of host memory: " + problem);
}

void Pool::reserve_host(size_t bytes) {
  std::lock_guard lock(reserve_mutex_);
  if (!units_.empty()) throw Failure(Status::kState, "reserve_host: this pool has a reserve");
  bytes = round_up(bytes, granularity_);
  char* const arena = map_host(bytes);
  if (!arena)
    throw Failure(Status::kHostOutOfMemory, "reserve_host: no " + std::to_string(bytes) + " bytes of host memory");
  for (size_t at = 0; at < bytes; at += chunk_bytes_) {
    Chunk unit;
    unit.host = arena + at;
    unit.bytes = std::min(chunk_bytes_, bytes - at);
    units_.push_back(unit);
  }
  is_pinned_.resize(units_.size());
  reserve_.bytes = bytes;
}

void Pool::pin_reserve() {
  std::vector<Chunk*> units;
  for (Chunk& unit : units_) units.push_back(&unit);
  Stopwatch watch;
  const std::string problem = pin_chunks(units, [this](size_t unit) {
    std::lock_guard lock(reserve_mutex_);
    is_pinned_[unit] = true;
    unit_pinned_.notify_all();
  });
  std::lock_guard lock(reserve_mutex_);
  reserve_.pinning_s = watch.seconds();
  if (problem.empty()) return;
  reserve_problem_ = "pinning a reserve of " + std::to_string(reserve_.bytes) + " bytes of host memory: " + problem;
  const size_t num_good = std::find(is_pinned_.begin(), is_pinned_.end(), false) - is_pinned_.begin();
  reserve_.bytes = num_good * chunk_bytes_;
  for (size_t i = num_good; i < units_.size(); ++i) {
    if (is_pinned_[i]) driver_.unregister_host(units_[i].host);
    munmap(units_[i].host, units_[i].bytes);
  }
  units_.resize(num_good);
  is_pinned_.resize(num_good);
  unit_pinned_.notify_all();
  throw Failure(Status::kHostOutOfMemory, reserve_problem_);
}

// Blocks lie in the order of their requests, and no chunk spans two units, which the driver pins separately. Return
// false if the reserve has no room.
bool Pool::take_reserve(Block& block, const std::string& tag) {
  std::unique_lock lock(reserve_mutex_);
  size_t place = next_;
  if (block.bytes > chunk_bytes_ - place % chunk_bytes_) place = round_up(place, chunk_bytes_);
  const size_t end = place + block.bytes;
  auto is_there = [&] {
    if (!reserve_problem_.empty() || end > reserve_.bytes) return true;
    const auto first = is_pinned_.begin() + place / chunk_bytes_;
    const auto last = is_pinned_.begin() + (end + chunk_bytes_ - 1) / chunk_bytes_;
    return std::find(first, last, false) == last;
  };
  if (!is_there()) {
    Stopwatch watch;
    unit_pinned_.wait(lock, is_there);
    reserve_.waited_s += watch.seconds();
  }
  if (!reserve_problem_.empty())
    throw Failure(Status::kHostOutOfMemory, "region " + tag + ": " + std::exchange(reserve_problem_, ""));
  if (end > reserve_.bytes) return false;
  for (Chunk& chunk : block.chunks) {
    chunk.host = units_[place / chunk_bytes_].host + place % chunk_bytes_;
    chunk.is_reserved = true;
    place += chunk.bytes;
  }
  next_ = end;
  reserve_.taken += block.bytes;
  return true;
}

Reserve Pool::reserve() {
  std::lock_guard lock(reserve_mutex_);
  return reserve_;
}

// `pinned` is called with each chunk as soon as it is pinned.
std::string Pool::pin_chunks(const std::vector<Chunk*>& chunks, const std::function<void(size_t)>& pinned) {
  std::atomic<size_t> next{0};
  std::atomic<bool> populated{true};
  std::atomic<CUresult> refused{kSuccess};
  auto work = [&] {
    Context context(*this);
    for (size_t i = next++; i < chunks.size() && populated && refused == kSuccess; i = next++) {
      if (!populate(chunks[i]->host, chunks[i]->bytes)) populated = false;
      else if (CUresult result = driver_.register_host(chunks[i]->host, chunks[i]->bytes, kPortable)) refused = result;
      else pinned(i);
    }
  };
  std::vector<std::thread> threads;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned i = 0; i < std::min({kPinThreads, cores, static_cast<unsigned>(chunks.size())}); ++i)
    threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  if (!populated) return std::strerror(ENOMEM);
  return refused == kSuccess ? "" : "cuMemHostRegister returned CUDA error " + std::to_string(refused);
}

void Pool::begin_copy_out(Chunk& chunk, const std::string& tag) {
  if (!chunk.copied) check(driver_.create_event(&chunk.copied, kNoTiming), "cuEventCreate", tag);
  check(driver_.copy_out(chunk.host, chunk.address, chunk.bytes, stream_out_), "cuMemcpyDtoHAsync", tag);
  check(driver_.record_event(chunk.copied, stream_out_), "cuEventRecord", tag);
}

Moved Pool::move(const std::string& out_tag, const std::string& in_tag) {
  std::lock_guard lock(mutex_);
  Context context(*this);
  Region* out = out_tag.empty() ? nullptr : &find(out_tag, "release", true);
  Region* in = in_tag.empty() ? nullptr : &find(in_tag, "restore", false);
  const bool copies_out =
      out && (out->policy == Policy::kCopy || (out->policy == Policy::kCopyOnce && !out->has_copy));
  const bool copies_in = in && in->policy != Policy::kDrop;
  if (copies_out) pin(*out);
  check(driver_.synchronize(), "cuCtxSynchronize", out_tag + in_tag);  // whoever still works in the memory

  const auto leaving = chunks(out), entering = chunks(in);
  Moved moved{copies_out ? size(leaving) : 0, copies_in ? size(entering) : 0};
  if (copies_out)
    for (Chunk* chunk : leaving) begin_copy_out(*chunk, out_tag);
  size_t next = 0, room = 0;
  auto take = [&] {
    Chunk* chunk = entering[next];
    map(*chunk, *in, size(entering));
    ++next;
    if (copies_in)
      check(driver_.copy_in(chunk->address, chunk->host, chunk->bytes, stream_in_), "cuMemcpyHtoDAsync", in_tag);
  };
  // A release that has begun completes before a restore may fail.
  std::exception_ptr failure;
  auto take_while = [&](auto allowed) {
    try {
      while (!failure && next < entering.size() && allowed()) take();
    } catch (const Failure&) {
      failure = std::current_exception();
    }
  };
  for (Chunk* chunk : leaving) {
    if (copies_out) check(driver_.synchronize_event(chunk->copied), "cuEventSynchronize", out_tag);
    unmap(*chunk, out_tag);
    room += chunk->bytes;
    take_while([&] {
      if (entering[next]->bytes > room) return false;
      room -= entering[next]->bytes;
      return true;
    });
  }
  if (out) {
    out->resident = false;
    out->has_copy = out->policy != Policy::kDrop;
  }
  take_while([] { return true; });
  if (in) check(driver_.synchronize_stream(stream_in_), "cuStreamSynchronize", in_tag);
  if (failure) {
    for (Chunk* chunk : entering)
      if (chunk->handle) unmap(*chunk, in_tag);
    std::rethrow_exception(failure);
  }
  if (in) in->resident = true;
  return moved;
}

void Pool::invalidate(const std::string& tag) {
  std::lock_guard lock(mutex_);
  find(tag, "invalidate", true).has_copy = false;
}

bool Pool::resident(const std::string& tag) {
  std::lock_guard lock(mutex_);
  return find(tag, "resident").resident;
}

size_t Pool::bytes(const std::string& tag) {
  std::lock_guard lock(mutex_);
  return size(chunks(&find(tag, "bytes")));
}

size_t Pool::released_bytes() {
  std::lock_guard lock(mutex_);
  size_t total = 0;
  for (auto& [tag, region] : regions_)
    if (!region.resident) total += size(chunks(&region));
  return total;
}

void* Pool::host(Address address) {
  std::lock_guard lock(mutex_);
  auto after = owners_.upper_bound(address);
  if (after != owners_.begin()) {
    auto [start, region] = *std::prev(after);
    const Block& block = region->blocks.at(start);
    const size_t offset = address - start;
    if (offset < block.bytes && block.chunks[0].host) return block.chunks[0].host + offset;
  }
  throw Failure(Status::kState, "host: no host copy of this address");
}

}  // namespace vmm
