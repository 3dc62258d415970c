#include "tape.h"

#include <array>

#include <ATen/Context.h>

#include "copied_tape.h"

namespace torchext {

namespace {

std::array<const Tape*, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>& tapes() {
  static std::array<const Tape*, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> tapes{};
  return tapes;
}

}  // namespace

void setTape(c10::DeviceType device, const Tape& tape) {
  tapes().at(static_cast<std::size_t>(device)) = &tape;
}

const Tape& tapeOf(c10::DeviceType device) {
  const Tape* tape = tapes().at(static_cast<std::size_t>(device));
  return tape == nullptr ? copiedTape() : *tape;
}

at::Generator defaultGenerator(c10::Device device) {
  if (device.is_meta()) {
    return {};
  }
  try {
    return at::globalContext().defaultGenerator(device);
  } catch (const c10::Error&) {  // this device type has no generators
    return {};
  }
}

PrivateGenerators& TapeReader::generatorsOf(const Tape& tape) {
  auto& generators = generators_[&tape];
  if (generators == nullptr) {
    generators = tape.makeGenerators();
  }
  return *generators;
}

}  // namespace torchext
