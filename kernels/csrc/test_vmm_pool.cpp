// The states of the pool on a driver in host memory; plain checks that need no test framework.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "fake_driver.h"
#include "vmm_pool.h"

using vmm::Address;
using vmm::Failure;
using vmm::Policy;
using vmm::Pool;
using vmm::Status;

namespace {

constexpr size_t kMib = size_t{1} << 20, kChunk = 4 * kMib;
using Log = std::vector<std::string>;

#define CHECK(condition)                                                        \
  if (!(condition)) {                                                           \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);         \
    std::exit(1);                                                               \
  }

Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure;
  }
  return Failure(Status::kOk, "");
}

bool says(const Failure& failure, const char* words) { return std::strstr(failure.what(), words); }

void fill(Address address, size_t bytes, int seed) {
  auto* words = reinterpret_cast<uint32_t*>(address);
  for (size_t i = 0; i < bytes / 4; ++i) words[i] = static_cast<uint32_t>(i * 2654435761u + seed);
}

bool holds(Address address, size_t bytes, int seed) {
  auto* words = reinterpret_cast<const uint32_t*>(address);
  for (size_t i = 0; i < bytes / 4; ++i)
    if (words[i] != static_cast<uint32_t>(i * 2654435761u + seed)) return false;
  return true;
}

struct House {
  explicit House(size_t capacity = 64 * kMib) : pool((fake::reset(capacity), fake::driver()), 0, kChunk) {}
  Address add(const char* tag, Policy policy, size_t bytes, int seed = 1) {
    pool.open(tag, policy);
    Address address = pool.allocate(tag, bytes);
    fill(address, bytes, seed);
    return address;
  }
  vmm::Moved release(const char* tag) { return pool.move(tag, ""); }
  vmm::Moved restore(const char* tag) { return pool.move("", tag); }
  Pool pool;
};

void contents_and_addresses_return() {
  House house;
  Address first = house.add("states", Policy::kCopy, 10 * kMib), second = house.add("states", Policy::kCopy, 3, 7);
  CHECK(fake::used() == 12 * kMib && house.pool.bytes("states") == 12 * kMib);  // rounded up to pages of 2 MiB
  for (int cycle = 0; cycle < 3; ++cycle) {
    CHECK(house.release("states").out == 12 * kMib);
    CHECK(fake::used() == 0 && !house.pool.resident("states") && fake::pinned() == 12 * kMib);
    CHECK(house.pool.released_bytes() == 12 * kMib);
    CHECK(house.restore("states").in == 12 * kMib && house.pool.released_bytes() == 0);
    CHECK(holds(first, 10 * kMib, cycle ? 20 + cycle : 1) && house.pool.resident("states"));
    fill(first, 10 * kMib, 21 + cycle);
    fill(second, 2 * kMib, 9);
  }
}

void dropped_contents_cost_nothing() {
  House house;
  house.add("gradients", Policy::kDrop, 8 * kMib);
  fake::take_log();
  CHECK(house.release("gradients").out == 0 && fake::used() == 0 && fake::pinned() == 0);
  CHECK(house.restore("gradients").in == 0 && fake::used() == 8 * kMib);
  CHECK((fake::take_log() == Log{"synchronize", "unmap", "synchronize", "map"}));  // in one piece, not in four chunks
}

void copy_once_copies_again_only_when_told() {
  House house;
  Address address = house.add("reference", Policy::kCopyOnce, 4 * kMib);
  CHECK(house.release("reference").out == 4 * kMib);
  house.restore("reference");
  fill(address, 4 * kMib, 5);
  CHECK(house.release("reference").out == 0);
  house.restore("reference");
  CHECK(holds(address, 4 * kMib, 1));  // the first copy: a frozen region that is written to must be invalidated
  fill(address, 4 * kMib, 6);
  house.pool.invalidate("reference");
  CHECK(house.release("reference").out == 4 * kMib);
  CHECK(holds(reinterpret_cast<Address>(house.pool.host(address)), 4 * kMib, 6));
  house.restore("reference");
  CHECK(holds(address, 4 * kMib, 6));
  Address more = house.add("reference", Policy::kCopyOnce, 2 * kMib, 8);  // grown
  CHECK(house.release("reference").out == 6 * kMib);
  house.restore("reference");
  CHECK(holds(address, 4 * kMib, 6) && holds(more, 2 * kMib, 8));
}

void a_chunk_leaves_as_soon_as_it_is_copied() {
  House house;
  house.add("states", Policy::kCopy, 2 * kChunk);
  fake::take_log();
  house.release("states");
  CHECK((fake::take_log() == Log{"synchronize", "out", "unmap", "out", "unmap"}));
}

void exchange_never_takes_more_than_was_given() {
  House house(3 * kChunk);
  house.add("critic", Policy::kCopy, 2 * kChunk, 1);
  house.release("critic");
  Address actor = house.add("actor", Policy::kCopy, 3 * kChunk, 2);
  house.release("actor");
  house.restore("critic");
  fake::take_log();
  vmm::Moved moved = house.pool.move("critic", "actor");
  CHECK(moved.out == 2 * kChunk && moved.in == 3 * kChunk);
  const Log expected{"synchronize", "out", "unmap", "map", "out", "unmap", "map", "map", "in", "in", "in"};
  CHECK(fake::take_log() == expected);
  CHECK(holds(actor, 3 * kChunk, 2) && !house.pool.resident("critic") && fake::used() == 3 * kChunk);
}

void out_of_memory_leaves_a_region_released() {
  House house(5 * kChunk);
  Address address = house.add("actor", Policy::kCopy, 3 * kChunk, 3);
  house.release("actor");
  house.add("kv", Policy::kCopy, 3 * kChunk);
  Failure failure = failure_of([&] { house.restore("actor"); });
  CHECK(failure.status == Status::kOutOfMemory && says(failure, "region actor"));
  CHECK(failure.wanted == 3 * kChunk && failure.free == 0);
  CHECK(!house.pool.resident("actor") && fake::used() == 3 * kChunk);
  house.release("kv");
  house.restore("actor");
  CHECK(holds(address, 3 * kChunk, 3));
  // After a failed exchange, the region that leaves is released.
  failure = failure_of([&] {
    fake::fail("create", 1, vmm::kDriverOutOfMemory);
    house.pool.move("actor", "kv");
  });
  CHECK(failure.status == Status::kOutOfMemory && says(failure, "region kv") && fake::used() == 0);
  CHECK(!house.pool.resident("actor") && !house.pool.resident("kv"));
  house.restore("actor");
  CHECK(holds(address, 3 * kChunk, 3));
}

void allocation_failures_leave_nothing_behind() {
  House house(2 * kChunk);
  house.pool.open("states", Policy::kCopy);
  Failure failure = failure_of([&] { house.pool.allocate("states", 3 * kChunk); });
  CHECK(failure.status == Status::kOutOfMemory && failure.wanted == 3 * kChunk && fake::used() == 0);
  for (const char* call : {"reserve", "create", "map", "set_access"}) {
    fake::fail(call, 0, 999);
    failure = failure_of([&] { house.pool.allocate("states", kChunk); });
    CHECK(failure.status == Status::kDriver && says(failure, "region states") && says(failure, "999"));
    CHECK(fake::used() == 0 && house.pool.bytes("states") == 0);
  }
}

void refused_pinning_leaves_a_region_resident() {
  House house;
  Address address = house.add("states", Policy::kCopy, 3 * kChunk);
  fake::fail("register_host", 1, 2);
  Failure failure = failure_of([&] { house.release("states"); });
  CHECK(failure.status == Status::kHostOutOfMemory && says(failure, "region states") && says(failure, "12582912"));
  CHECK(house.pool.resident("states") && fake::pinned() == 0 && holds(address, 3 * kChunk, 1));
  CHECK(house.release("states").out == 3 * kChunk);
}

void calls_in_the_wrong_state_are_refused() {
  House house;
  house.add("states", Policy::kCopy, kMib);
  struct Case {
    std::function<void()> call;
    const char* words;
  };
  auto refused = [](const std::vector<Case>& cases) {
    for (const Case& each : cases) {
      Failure failure = failure_of(each.call);
      CHECK(failure.status == Status::kState && says(failure, each.words));
    }
  };
  refused({{[&] { house.restore("states"); }, "restore: region states is resident already"},
           {[&] { house.release("other"); }, "release: there is no region other"},
           {[&] { house.pool.open("states", Policy::kDrop); }, "region states has another policy"},
           {[&] { house.pool.free(4096); }, "not of this pool"},
           {[&] { house.pool.host(4096); }, "no host copy"}});
  house.release("states");
  refused({{[&] { house.release("states"); }, "release: region states is released"},
           {[&] { house.pool.open("states", Policy::kCopy); }, "allocate: region states is released"},
           {[&] { house.pool.allocate("states", 1); }, "allocate: region states is released"},
           {[&] { house.pool.invalidate("states"); }, "invalidate: region states is released"}});
}

void freed_blocks_give_everything_back() {
  House house;
  Address kept = house.add("states", Policy::kCopy, kChunk, 4), gone = house.add("states", Policy::kCopy, kChunk);
  house.release("states");
  house.pool.free(gone);
  CHECK(fake::pinned() == kChunk && house.pool.bytes("states") == kChunk);
  CHECK(house.restore("states").in == kChunk && holds(kept, kChunk, 4));
  house.pool.free(kept);
  CHECK(fake::pinned() == 0 && fake::used() == 0);
}

bool is_done(const std::future<vmm::Moved>& call, int ms) {
  return call.wait_for(std::chrono::milliseconds(ms)) == std::future_status::ready;
}

void a_first_release_waits_for_its_part_of_the_reserve() {
  House house;
  Address small = house.add("states", Policy::kCopy, kMib, 1), large = house.add("states", Policy::kCopy, 9 * kMib, 2);
  Address third = house.add("states", Policy::kCopy, kMib, 3);
  house.pool.reserve_host(18 * kMib);
  CHECK(fake::pinned() == 0);
  fake::hold_pinning(true);
  std::thread pinning([&] { house.pool.pin_reserve(); });
  std::future<vmm::Moved> release = std::async(std::launch::async, [&] { return house.release("states"); });
  CHECK(!is_done(release, 30) && fake::pinned() == 0);
  fake::hold_pinning(false);
  CHECK(release.get().out == 14 * kMib);
  pinning.join();
  // 2, 10 and 2 MiB: a block that does not fit into the rest of a unit of 4 MiB starts the next unit, because the
  // driver rejects a copy across two units.
  const vmm::Reserve reserve = house.pool.reserve();
  CHECK(reserve.bytes == 18 * kMib && reserve.taken == 14 * kMib && reserve.waited_s > 0.02);
  CHECK(reserve.pinning_s > 0.02 && fake::pinned() == 18 * kMib);
  house.restore("states");
  CHECK(holds(small, kMib, 1) && holds(large, 9 * kMib, 2));
  house.add("more", Policy::kCopy, 8 * kMib, 4);  // there is no room for it
  CHECK(house.release("more").out == 8 * kMib && fake::pinned() == 26 * kMib);
  CHECK(house.pool.reserve().taken == 14 * kMib);
  CHECK(says(failure_of([&] { house.pool.reserve_host(kMib); }), "has a reserve"));
  house.pool.free(large);
  CHECK(fake::pinned() == 26 * kMib && house.pool.reserve().taken == 4 * kMib);  // the reserve keeps what was pinned
  house.pool.free(small);
  house.pool.free(third);
  Address next = house.add("next run", Policy::kCopy, 17 * kMib, 5);
  CHECK(house.release("next run").out == 18 * kMib && house.pool.reserve().taken == 18 * kMib);
  house.restore("next run");
  CHECK(fake::pinned() == 26 * kMib && holds(next, 17 * kMib, 5));
}

void a_failed_reserve_is_told_by_the_release_that_needs_it() {
  House house;
  Address first = house.add("first", Policy::kCopy, kChunk, 1), second = house.add("second", Policy::kCopy, kChunk, 2);
  house.pool.reserve_host(3 * kChunk);
  fake::fail("register_host", 0, 2);
  Failure failure = failure_of([&] { house.pool.pin_reserve(); });
  CHECK(failure.status == Status::kHostOutOfMemory && says(failure, "12582912 bytes") && says(failure, "error 2"));
  failure = failure_of([&] { house.release("first"); });
  CHECK(failure.status == Status::kHostOutOfMemory && says(failure, "region first: pinning a reserve of 12582912"));
  CHECK(house.pool.resident("first"));
  for (const char* tag : {"first", "second"}) {  // told once; after it a release pins what it needs, or is refused
    CHECK(house.release(tag).out == kChunk);
    house.restore(tag);
  }
  CHECK(holds(first, kChunk, 1) && holds(second, kChunk, 2));
}

void threads_take_turns() {
  House house(256 * kMib);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&house, i] {
      const std::string tag = "region" + std::to_string(i);
      Address address = house.add(tag.c_str(), Policy::kCopy, 2 * kChunk, i);
      for (int cycle = 0; cycle < 10; ++cycle) {
        house.release(tag.c_str());
        house.restore(tag.c_str());
        CHECK(holds(address, 2 * kChunk, i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  contents_and_addresses_return();
  dropped_contents_cost_nothing();
  copy_once_copies_again_only_when_told();
  a_chunk_leaves_as_soon_as_it_is_copied();
  exchange_never_takes_more_than_was_given();
  out_of_memory_leaves_a_region_released();
  allocation_failures_leave_nothing_behind();
  refused_pinning_leaves_a_region_resident();
  calls_in_the_wrong_state_are_refused();
  freed_blocks_give_everything_back();
  a_first_release_waits_for_its_part_of_the_reserve();
  a_failed_reserve_is_told_by_the_release_that_needs_it();
  threads_take_turns();
  CHECK(fake::used() == 0 && fake::pinned() == 0);
  std::puts("ok");
}
