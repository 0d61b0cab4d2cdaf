// Work shared among the threads that XLA has: in parts, or step by step.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/c_api.h"

namespace {

// Whether a function of XLA's says that it failed; there is no pool, for one.
inline bool failed(const XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  if (error == nullptr) return false;
  XLA_FFI_Error_Destroy_Args args{};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  frame->api->XLA_FFI_Error_Destroy(&args);
  return true;
}

struct Range {
  int64_t begin, end;
};

inline Range part(int64_t count, int64_t rank, int64_t parts) {
  return {count * rank / parts, count * (rank + 1) / parts};
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// Threads that have helped before. Where a virtual machine's host has taken idle cores away, Linux
// puts two threads on one core: a helper on the core of the leader, which wakes it, or the leader,
// when it goes on, on that of a helper that is awake. Then one waits for milliseconds while the
// other works. So the leader sends such a helper to another core.
class Helpers {
 public:
  // A thread that helps says on which core it is. It is known from then on, until it ends.
  static void on_core() { set_core(current_core()); }
  // It goes to sleep, and may wake up on any.
  static void asleep() { set_core(-1); }

  // Moves helpers off this thread's core: those that said that they are there and, where one was
  // `woken`, those that were asleep. Their masks are put back at once, to that of the process's
  // first thread, which nobody sends away. A helper with another mask is left alone: it is pinned,
  // or being sent away. As in every mask that was set, a core that the process is given later is
  // not in it.
  static void send_away(bool woken) {
#if defined(__linux__)
    const int core = current_core();
    cpu_set_t all, others, own;
    bool asked = false;
    for (const Place& place : places()) {
      const Name name = place.name.load(std::memory_order_relaxed);
      const int at = place.core.load(std::memory_order_relaxed);
      if (name.thread == 0 || !(at == core || (woken && at == -1))) continue;
      const int process = getpid();
      if (name.process != process || name.thread == process) continue;
      if (name.thread == this_thread()) continue;
      if (!asked) {
        if (core < 0 || sched_getaffinity(process, sizeof(all), &all) != 0) return;
        others = all;
        CPU_CLR(core, &others);
        if (CPU_COUNT(&others) == 0) return;
        asked = true;
      }
      if (sched_getaffinity(name.thread, sizeof(own), &own) != 0) continue;
      if (!CPU_EQUAL(&own, &all)) continue;
      if (sched_setaffinity(name.thread, sizeof(others), &others) == 0)
        sched_setaffinity(name.thread, sizeof(all), &all);
    }
#else
    (void)woken;
#endif
  }

 private:
#if defined(__linux__)
  struct Name {
    int process, thread;
  };
  struct Place {
    std::atomic<Name> name{Name{0, 0}};
    std::atomic<int> core{-1};
  };

  struct Known {
    Place* place = nullptr;
    Known() {
      const Name own{getpid(), this_thread()};
      for (Place& each : places()) {
        Name there = each.name.load();
        if (there.thread != 0 && there.process == own.process) continue;  // else it is of a parent
        if (!each.name.compare_exchange_strong(there, own)) continue;
        place = &each;
        return;
      }
    }
    ~Known() {
      if (place != nullptr) place->name.store({0, 0});
    }
  };

  static int current_core() { return sched_getcpu(); }
  static int this_thread() { return int(syscall(SYS_gettid)); }
  static void set_core(int core) {
    static thread_local const Known known;
    if (known.place == nullptr) return;
    if (known.place->core.load(std::memory_order_relaxed) != core)  // its line is read by leaders
      known.place->core.store(core, std::memory_order_relaxed);
  }
  static std::array<Place, 64>& places() {
    static std::array<Place, 64> all{};
    return all;
  }
#else
  static int current_core() { return -1; }
  static void set_core(int) {}
#endif
};

// What runs on XLA's threads. A task that starts late finds the job alive, and nothing left to do.
//
// A thread that has helped stays awake for a little while: to wake one takes as long as a short
// call, and a training step makes four calls, one after the other. It waits in a seat, where one
// job at a time is handed to it, and goes back to XLA after so many jobs, however often they come:
// others have tasks for it too.
class Job {
 public:
  virtual ~Job() = default;
  virtual void help() = 0;

  // Hands a job to threads that are awake, or to XLA's pool.
  static void hand_over(const XLA_FFI_CallFrame* frame, std::shared_ptr<Job> job, int times) {
    bool woken = false;
    for (int n = 0; n < times; ++n) woken |= !hand_over(frame, job);
    if (times > 0) Helpers::send_away(woken);
  }

 protected:
  // Whether this thread is handing over a task: a pool whose queue is full runs it there and then.
  static bool& scheduling() {
    static thread_local bool now = false;
    return now;
  }

 private:
  using Handed = std::shared_ptr<Job>;
  using Seat = std::atomic<Handed*>;  // null: free; waiting(): a thread is there; else its job
  static constexpr int kSeats = 64, kMostJobs = 256;
  static constexpr std::chrono::microseconds kAwake{200};

  // Hands it over once; whether to a thread that was awake.
  static bool hand_over(const XLA_FFI_CallFrame* frame, const std::shared_ptr<Job>& job) {
    auto* handed = new (std::nothrow) Handed(job);
    if (handed == nullptr) return false;  // others may be at work already: no exception
    for (Seat& seat : seats()) {
      Handed* idle = waiting();
      if (seat.load(std::memory_order_relaxed) != idle) continue;
      if (seat.compare_exchange_strong(idle, handed)) return true;
    }
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    args.task = &Job::task;
    args.data = handed;
    scheduling() = true;
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) delete handed;
    scheduling() = false;
    return false;
  }

  static void task(void* data) {
    if (!scheduling()) Helpers::on_core();
    auto* handed = static_cast<Handed*>(data);
    for (int jobs = 0; handed != nullptr; ++jobs) {
      (*handed)->help();
      delete handed;
      handed = scheduling() || jobs == kMostJobs ? nullptr : next();
    }
    if (!scheduling()) Helpers::asleep();
  }

  // A job that comes within kAwake; null if none does. Only who sits in a seat leaves it free.
  static Handed* next() {
    Seat* own = nullptr;
    for (Seat& seat : seats()) {
      Handed* free = nullptr;
      if (seat.load(std::memory_order_relaxed) == nullptr &&
          seat.compare_exchange_strong(free, waiting())) {
        own = &seat;
        break;
      }
    }
    if (own == nullptr) return nullptr;
    const auto end = std::chrono::steady_clock::now() + kAwake;
    do {
      Helpers::on_core();
      for (int pauses = 0; pauses < 16; ++pauses) {
        if (own->load(std::memory_order_relaxed) != waiting()) return own->exchange(nullptr);
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    Handed* none = waiting();
    return own->compare_exchange_strong(none, nullptr) ? nullptr : own->exchange(nullptr);
  }

  static std::array<Seat, kSeats>& seats() {
    static std::array<Seat, kSeats> all{};
    return all;
  }
  static Handed* waiting() {  // no job, but an address that no job has
    alignas(Handed) static char mark[sizeof(Handed)];
    return reinterpret_cast<Handed*>(mark);
  }
};

template <typename Done>
void wait(Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < 256) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Parts that do not wait for each other: whoever comes takes the next.
template <typename Run>
class Parts : public Job {
 public:
  Parts(int parts, Run run) : parts_(parts), run_(run) {}
  void help() override {
    for (int n; (n = next_.fetch_add(1)) < parts_;) {
      run_(n, parts_);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  void wait_for_all() {
    wait([this] { return done_.load(std::memory_order_acquire) == parts_; });
  }

 private:
  const int parts_;
  Run run_;  // of part 1 of 2, ...; what it refers to outlives wait_for_all
  std::atomic<int> next_{0}, done_{0};
};

template <typename Run>
void in_parts(const XLA_FFI_CallFrame* frame, int threads, int parts, Run run) {
  auto job = std::make_shared<Parts<Run>>(parts, run);
  Job::hand_over(frame, job, threads - 1);
  job->help();
  job->wait_for_all();
}

constexpr int kMostOwnParts = 64;  // one bit each

// Parts of which each thread has some that it takes first, from the first to the last or `back`;
// then it takes those that others have left. A leader and its only helper have the same ones every
// time, and their caches may hold what they read for them before.
template <typename Run>
class OwnParts : public Job {
 public:
  OwnParts(int threads, int parts, bool back, Run run)
      : threads_(threads), parts_(parts), back_(back), run_(run) {}
  void help() override { take(asked_.fetch_add(1)); }
  void lead() {
    take(0);
    wait([this] { return done_.load(std::memory_order_acquire) == parts_; });
  }

 private:
  void take(int rank) {
    const int each = (parts_ + threads_ - 1) / threads_;
    for (int n = 0; n < threads_; ++n)
      for (int m = 0; m < each; ++m) {
        const int owner = (rank + n) % threads_;
        const bool from_end = back_ != (n > 0);  // of another's, what it would take last
        const int part = owner * each + (from_end ? each - 1 - m : m);
        if (part >= parts_) continue;
        const uint64_t bit = uint64_t(1) << part;
        if ((taken_.load(std::memory_order_relaxed) & bit) != 0) continue;
        if ((taken_.fetch_or(bit) & bit) != 0) continue;
        run_(part, parts_);
        done_.fetch_add(1, std::memory_order_release);
      }
  }
  const int threads_, parts_;
  const bool back_;
  Run run_;  // as of Parts
  std::atomic<int> asked_{1}, done_{0};
  std::atomic<uint64_t> taken_{0};
};

// At most kMostOwnParts parts.
template <typename Run>
void in_own_parts(const XLA_FFI_CallFrame* frame, int threads, int parts, bool back, Run run) {
  threads = std::min(threads, parts);
  auto job = std::make_shared<OwnParts<Run>>(threads, parts, back, run);
  Job::hand_over(frame, job, threads - 1);
  job->lead();
}

// Threads that share each step, and wait for each other after it. The first step waits a little for
// all of them; one that comes late is let in at the next, and nobody waits for one that XLA has no
// thread for.
template <typename Run>
class Team : public Job {
 public:
  Team(int64_t steps, Run run) : steps_(steps), run_(run) {}
  void help() override {
    if (scheduling()) return;  // it would wait for its own leader
    const int rank = asked_.fetch_add(1);
    uint64_t state = 0;
    wait([&] {
      state = state_.load(std::memory_order_acquire);
      return size_of(state) > rank || turn_of(state) >= steps_;
    });
    while (turn_of(state) < steps_) {
      run_(turn_of(state), rank, size_of(state));
      arrived_.fetch_add(1, std::memory_order_release);
      const uint64_t before = state;
      wait([&] { return (state = state_.load(std::memory_order_acquire)) != before; });
    }
  }
  void lead(int threads, int64_t patience) {
    for (int64_t spins = 0; spins < patience && asked_.load(std::memory_order_relaxed) < threads;
         ++spins)
      pause();
    int64_t size = asked_.load(std::memory_order_relaxed);
    state_.store(uint64_t(size), std::memory_order_release);
    for (int64_t turn = 0; turn < steps_;) {
      run_(turn, 0, int(size));
      wait([&] { return arrived_.load(std::memory_order_acquire) == size - 1; });
      arrived_.store(0, std::memory_order_relaxed);
      ++turn;
      size = asked_.load(std::memory_order_relaxed);
      state_.store(uint64_t(turn) << 16 | uint64_t(size), std::memory_order_release);
    }
  }

 private:
  static int size_of(uint64_t state) { return state & 0xffff; }
  static int64_t turn_of(uint64_t state) { return state >> 16; }
  const int64_t steps_;
  Run run_;  // of a step; what it refers to is read by members alone, whom the leader waits for
  std::atomic<int> asked_{1}, arrived_{0};
  std::atomic<uint64_t> state_{1};
};

// `work` is that of a step, in multiply-adds. Help with it is worth waiting for as long as one
// thread would take for it.
template <typename Run>
void in_team(const XLA_FFI_CallFrame* frame, int threads, int64_t steps, int64_t work, Run run) {
  constexpr int64_t kWorkOfPause = 1000;  // that a thread does in the time of a pause
  constexpr int64_t kMostPauses = 8192;
  auto job = std::make_shared<Team<Run>>(steps, run);
  Job::hand_over(frame, job, threads - 1);
  job->lead(threads, std::min(work / kWorkOfPause, kMostPauses));
}

inline int pool_threads(const XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{};
  args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  args.num_threads = &threads;
  return failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? 1 : int(threads);
}

}  // namespace
