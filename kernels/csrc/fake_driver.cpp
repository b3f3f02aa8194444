#include "fake_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace {

constexpr vmm::CUresult kInvalid = 1;

struct Memory {
  int file;
  size_t bytes;
};
struct Event {
  int stream = 0;
  size_t position = 0;
};
struct Stream {
  std::vector<std::function<void()>> work;
  size_t done = 0;
};
struct Fault {
  int after, code;
};
struct State {
  std::mutex mutex;
  size_t capacity = 0, used = 0;
  vmm::Handle last_handle = 0;
  std::map<vmm::Handle, Memory> memories;
  std::map<vmm::Address, size_t> reserved, mapped;
  std::map<char*, size_t> pinned;
  std::vector<Stream> streams;
  std::map<std::string, Fault> faults;
  std::vector<std::string> log;
};
State state;
std::atomic<bool> is_pinning_held{false};
using Lock = std::lock_guard<std::mutex>;

// A call that a test makes fail returns the given code, once.
vmm::CUresult fault(const char* call) {
  auto found = state.faults.find(call);
  if (found == state.faults.end() || found->second.after-- > 0) return vmm::kSuccess;
  const int code = found->second.code;
  state.faults.erase(found);
  return code;
}

bool contains(const std::map<vmm::Address, size_t>& ranges, vmm::Address address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto [start, size] = *std::prev(after);
  return address + bytes <= start + size;
}

bool is_pinned(const void* host, size_t bytes) {
  auto after = state.pinned.upper_bound(static_cast<char*>(const_cast<void*>(host)));
  if (after == state.pinned.begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(host) + bytes <= start + size;
}

void run(Stream& stream, size_t end) {
  while (stream.done < end) stream.work[stream.done++]();
}

vmm::CUresult enqueue(void* stream, const char* what, vmm::Address address, void* to, const void* from, size_t bytes) {
  Lock lock(state.mutex);
  if (auto code = fault(what)) return code;
  if (!contains(state.mapped, address, bytes) || !is_pinned(*what == 'o' ? to : from, bytes)) return kInvalid;
  state.streams[reinterpret_cast<size_t>(stream)].work.push_back([=] {
    std::memcpy(to, from, bytes);
    state.log.push_back(what);
  });
  return vmm::kSuccess;
}

bool replace(vmm::Address address, size_t bytes, int protection, int flags, int file) {
  return mmap(reinterpret_cast<void*>(address), bytes, protection, flags | MAP_FIXED, file, 0) != MAP_FAILED;
}

vmm::Driver make() {
  vmm::Driver d{};
  d.init = [](unsigned) { return 0; };
  d.primary_context = [](void** context, int) { return *context = &state, 0; };
  d.push_context = [](void*) { return 0; };
  d.pop_context = [](void**) { return 0; };
  d.synchronize = [] {
    Lock lock(state.mutex);
    for (Stream& stream : state.streams) run(stream, stream.work.size());
    state.log.push_back("synchronize");
    return fault("synchronize");
  };
  d.memory_info = [](size_t* free, size_t* total) {
    *total = state.capacity;
    return *free = state.capacity - state.used, 0;
  };
  d.granularity = [](size_t* bytes, const vmm::AllocationProperties*, int) { return *bytes = size_t{2} << 20, 0; };
  d.reserve = [](vmm::Address* address, size_t bytes, size_t, vmm::Address, unsigned long long) {
    Lock lock(state.mutex);
    if (auto code = fault("reserve")) return code;
    void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = reinterpret_cast<vmm::Address>(place);
    state.reserved[*address] = bytes;
    return 0;
  };
  d.free_address = [](vmm::Address address, size_t bytes) {
    Lock lock(state.mutex);
    if (state.reserved[address] != bytes) return kInvalid;
    state.reserved.erase(address);
    return munmap(reinterpret_cast<void*>(address), bytes);
  };
  d.create = [](vmm::Handle* handle, size_t bytes, const vmm::AllocationProperties* properties, unsigned long long) {
    Lock lock(state.mutex);
    if (auto code = fault("create")) return code;
    if (properties->type != 1 || properties->location.type != 1) return kInvalid;
    if (state.used + bytes > state.capacity) return vmm::kDriverOutOfMemory;
    int file = memfd_create("fake", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return kInvalid;
    state.memories[*handle = ++state.last_handle] = {file, bytes};
    state.used += bytes;
    return 0;
  };
  d.release = [](vmm::Handle handle) {
    Lock lock(state.mutex);
    auto found = state.memories.find(handle);
    if (found == state.memories.end()) return kInvalid;
    state.used -= found->second.bytes;
    close(found->second.file);
    state.memories.erase(found);
    return 0;
  };
  d.map = [](vmm::Address address, size_t bytes, size_t, vmm::Handle handle, unsigned long long) {
    Lock lock(state.mutex);
    if (auto code = fault("map")) return code;
    if (!contains(state.reserved, address, bytes) || contains(state.mapped, address, 1)) return kInvalid;
    if (!state.memories.count(handle) || !replace(address, bytes, PROT_NONE, MAP_SHARED, state.memories[handle].file))
      return kInvalid;
    state.mapped[address] = bytes;
    state.log.push_back("map");
    return 0;
  };
  d.unmap = [](vmm::Address address, size_t bytes) {
    Lock lock(state.mutex);
    if (state.mapped[address] != bytes) return kInvalid;
    state.mapped.erase(address);
    state.log.push_back("unmap");
    return replace(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1) ? 0 : kInvalid;
  };
  d.set_access = [](vmm::Address address, size_t bytes, const vmm::Access* access, size_t) {
    Lock lock(state.mutex);
    if (auto code = fault("set_access")) return code;
    if (!contains(state.mapped, address, bytes) || access->flags != 3) return kInvalid;
    return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
  };
  d.register_host = [](void* host, size_t bytes, unsigned) {
    while (is_pinning_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Lock lock(state.mutex);
    if (auto code = fault("register_host")) return code;
    state.pinned[static_cast<char*>(host)] = bytes;
    return 0;
  };
  d.unregister_host = [](void* host) {
    Lock lock(state.mutex);
    return state.pinned.erase(static_cast<char*>(host)) ? 0 : kInvalid;
  };
  d.copy_out = [](void* host, vmm::Address address, size_t bytes, void* stream) {
    return enqueue(stream, "out", address, host, reinterpret_cast<void*>(address), bytes);
  };
  d.copy_in = [](vmm::Address address, const void* host, size_t bytes, void* stream) {
    return enqueue(stream, "in", address, reinterpret_cast<void*>(address), host, bytes);
  };
  d.create_stream = [](void** stream, unsigned) {
    Lock lock(state.mutex);
    *stream = reinterpret_cast<void*>(state.streams.size());
    state.streams.emplace_back();
    return 0;
  };
  d.synchronize_stream = [](void* stream) {
    Lock lock(state.mutex);
    Stream& queue = state.streams[reinterpret_cast<size_t>(stream)];
    run(queue, queue.work.size());
    return 0;
  };
  d.create_event = [](void** event, unsigned) { return *event = new Event, 0; };
  d.destroy_event = [](void* event) { return delete static_cast<Event*>(event), 0; };
  d.record_event = [](void* event, void* stream) {
    Lock lock(state.mutex);
    const size_t index = reinterpret_cast<size_t>(stream);
    *static_cast<Event*>(event) = {static_cast<int>(index), state.streams[index].work.size()};
    return 0;
  };
  d.synchronize_event = [](void* event) {
    Lock lock(state.mutex);
    const Event& mark = *static_cast<Event*>(event);
    run(state.streams[mark.stream], mark.position);
    return 0;
  };
  return d;
}

}  // namespace

namespace fake {

const vmm::Driver& driver() {
  static const vmm::Driver driver = make();
  return driver;
}

void reset(size_t capacity) {
  Lock lock(state.mutex);
  state.capacity = capacity;
  state.faults.clear();
  state.log.clear();
}

size_t used() { return state.used; }

size_t pinned() {
  size_t bytes = 0;
  for (auto& [host, size] : state.pinned) bytes += size;
  return bytes;
}

void fail(const std::string& call, int after, int code) { state.faults[call] = {after, code}; }

void hold_pinning(bool is_held) { is_pinning_held = is_held; }

std::vector<std::string> take_log() { return std::exchange(state.log, {}); }

}  // namespace fake

// Linked instead of cuda_driver.cpp, this is also the driver of the C interface.
const vmm::Driver* vmm::system_driver(const char**) { return &fake::driver(); }

extern "C" {
void fake_reset(size_t capacity) { fake::reset(capacity); }
size_t fake_used() { return fake::used(); }
void fake_fail(const char* call, int after, int code) { fake::fail(call, after, code); }
void fake_hold_pinning(int is_held) { fake::hold_pinning(is_held); }
}
