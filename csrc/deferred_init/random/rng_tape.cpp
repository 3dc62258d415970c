#include "rng_tape.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include <ATen/core/DistributionsHelper.h>

#include "../../fills/mt19937_jump.h"
#include "../../fills/twister.h"

namespace torchext {

using at::CPUGeneratorImpl;
using at::Generator;

namespace {

CPUGeneratorImpl& cpuImpl(const Generator& generator) {
  return *generator.get<CPUGeneratorImpl>();
}

// In all of this the caller holds the generator's mutex.

at::mt19937_data_pod engineOf(CPUGeneratorImpl& impl) {
  return impl.engine().data();
}

void setEngine(CPUGeneratorImpl& impl, const at::mt19937_data_pod& data) {
  at::mt19937 engine;
  engine.set_data(data);
  impl.set_engine(engine);
}

KeptNormals keptNormals(CPUGeneratorImpl& impl) {
  return {impl.next_float_normal_sample(), impl.next_double_normal_sample()};
}

void setKeptNormals(CPUGeneratorImpl& impl, const KeptNormals& kept) {
  impl.set_next_float_normal_sample(kept.of_float);
  impl.set_next_double_normal_sample(kept.of_double);
}

void skipLocked(CPUGeneratorImpl& impl, std::uint64_t draws) {
  if (draws == 0) {
    return;
  }
  at::mt19937_data_pod data = engineOf(impl);
  advance(data, draws);
  setEngine(impl, data);
}

// Marks are this far apart, or farther. A mark has the size of this many draws divided by a hundred, and to walk to the
// next one takes less than 20 us.
constexpr std::uint64_t kDrawsBetweenMarks = std::uint64_t{1} << 16U;

std::uint64_t nextTape() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Where this thread last left the engine of a generator. While the next operator finds it there, it is on the same
// tape; when somebody has moved or seeded the generator meanwhile, a tape begins.
struct LastSeen {
  std::shared_ptr<const TapeMark> mark;
  std::uint64_t draws = 0;
  at::mt19937_data_pod engine{};
};

thread_local LastSeen last_seen;

TapePosition positionLocked(CPUGeneratorImpl& impl) {
  const at::mt19937_data_pod engine = engineOf(impl);
  if (last_seen.mark == nullptr || !areSame(last_seen.engine, engine)) {
    last_seen = {std::make_shared<const TapeMark>(TapeMark{nextTape(), 0, engine}), 0, engine};
  } else if (last_seen.draws - last_seen.mark->draws >= kDrawsBetweenMarks) {
    last_seen.mark = std::make_shared<const TapeMark>(TapeMark{last_seen.mark->tape, last_seen.draws, engine});
  }
  return {last_seen.mark, last_seen.draws, keptNormals(impl), std::nullopt};
}

// To be called when the generator has moved on from the last position by `draws`.
void sawMove(CPUGeneratorImpl& impl, std::uint64_t draws) {
  last_seen.draws += draws;
  last_seen.engine = engineOf(impl);
}

}  // namespace

TapePosition tapePosition(Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return positionLocked(cpuImpl(generator));
}

TapePosition takeDraws(Generator generator, std::uint64_t draws) {
  const std::lock_guard lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  TapePosition position = positionLocked(impl);
  position.length = draws;
  skipLocked(impl, draws);
  sawMove(impl, draws);
  return position;
}

TapePosition takeNormals(Generator generator, std::uint64_t count) {
  constexpr std::uint64_t kDrawsOfPair = 4;  // two doubles, two draws each
  const std::lock_guard lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  TapePosition position = positionLocked(impl);
  if (count > 0 && impl.next_double_normal_sample().has_value()) {
    impl.set_next_double_normal_sample(std::nullopt);
    count -= 1;
  }
  position.length = (count + 1) / 2 * kDrawsOfPair;
  skipLocked(impl, count / 2 * kDrawsOfPair);
  if (count % 2 == 1) {
    const at::normal_distribution<double> normal(0, 1);
    normal(&impl);  // keeps the second value of the pair
  }
  sawMove(impl, *position.length);
  return position;
}

TapeReader::Cursor* TapeReader::nearest(const TapePosition& position) {
  Cursor* found = nullptr;
  for (Cursor& cursor : cursors_) {
    const bool is_on_the_way =
        cursor.tape == position.mark->tape && position.mark->draws <= cursor.draws && cursor.draws <= position.draws;
    if (is_on_the_way && (found == nullptr || found->draws < cursor.draws)) {
      found = &cursor;
    }
  }
  return found;
}

TapeReader::Cursor& TapeReader::leastRecentlyUsed() {
  return *std::min_element(cursors_.begin(), cursors_.end(),
                           [](const Cursor& a, const Cursor& b) { return a.last_use < b.last_use; });
}

// A cursor that would have to move is left for the operators that go on there, and another one takes its place on the
// way, unless all others have been used since.
const Generator& TapeReader::moveTo(const TapePosition& position) {
  Cursor* start = nearest(position);
  const bool goes_on = start != nullptr && start->draws == position.draws;
  Cursor& cursor = goes_on ? *start : leastRecentlyUsed();
  if (!cursor.generator.defined()) {
    cursor.generator = at::detail::createCPUGenerator();
  }
  CPUGeneratorImpl& impl = cpuImpl(cursor.generator);
  if (&cursor != start) {
    setEngine(impl, start == nullptr ? position.mark->engine : engineOf(cpuImpl(start->generator)));
    cursor.draws = start == nullptr ? position.mark->draws : start->draws;
  }
  skipLocked(impl, position.draws - cursor.draws);
  setKeptNormals(impl, position.kept);
  cursor.tape = position.length ? position.mark->tape : 0;
  cursor.draws = position.draws + position.length.value_or(0);
  cursor.last_use = ++uses_;
  return cursor.generator;
}

DefaultGeneratorAt::DefaultGeneratorAt(const TapePosition& position) {
  Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  CPUGeneratorImpl& impl = cpuImpl(generator);
  previous_engine_ = engineOf(impl);
  previous_kept_ = keptNormals(impl);
  setEngine(impl, position.mark->engine);
  skipLocked(impl, position.draws - position.mark->draws);
  setKeptNormals(impl, position.kept);
}

DefaultGeneratorAt::~DefaultGeneratorAt() {
  Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  setEngine(cpuImpl(generator), previous_engine_);
  setKeptNormals(cpuImpl(generator), previous_kept_);
}

}  // namespace torchext
