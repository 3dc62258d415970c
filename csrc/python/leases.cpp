#include "leases.h"

#include <atomic>
#include <exception>
#include <map>
#include <memory>

#include "../fake/gradient_factories.h"
#include "../support/leases.h"
#include "interpreter.h"
#include "module.h"
#include "patching.h"

namespace torchext::python {

namespace {

// An autocast region is entered and left in less than a microsecond, and usually is the only holder of its lease. The
// same holds for marked tensors in a loop. So Python provides the exchanges in advance, while no other lease replaces
// the same functions.
struct Exchanges {
  pybind11::list codes;
  pybind11::list functions;
};

struct Switch {
  bool is_offered = false;
  Exchanges on;
  Exchanges off;
};

// By lease. Leaked: holders may be destroyed while the process ends.
std::map<const Lease*, Switch>& switches() {
  static auto* all = new std::map<const Lease*, Switch>;
  return *all;
}

void offerSwitch(Lease& lease, const pybind11::tuple& on, const pybind11::tuple& off) {
  switches()[&lease] = {true, {on[0], on[1]}, {off[0], off[1]}};
}

void withdrawSwitches() {
  for (auto& [lease, offered] : switches()) {
    offered.is_offered = false;
  }
}

// Settles `lease` at once by the exchanges that Python provided. Returns false if it provided none.
bool switchLease(Lease& lease, bool is_wanted) noexcept {
  const auto found = switches().find(&lease);
  if (found == switches().end() || !found->second.is_offered) {
    return false;
  }
  try {
    const Exchanges exchanges = is_wanted ? found->second.on : found->second.off;  // may be replaced while they run
    replaceFunctions(exchanges.functions);
    exchangeCodes(exchanges.codes);
  } catch (const std::exception&) {
    return false;  // settling the lease raises the error again
  }
  lease.setActive(is_wanted);
  return true;
}

// Whether a call that settles leases is pending in the interpreter.
std::atomic<bool> is_pending{false};

int settleWhenAsked(void* /*unused*/) {
  is_pending = false;
  const pybind11::gil_scoped_acquire gil;
  try {
    pybind11::reinterpret_borrow<pybind11::object>(provided(Provided::kSettleLeases))(false);
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable("torchext.tools.leases.settle()");
  }
  return 0;
}

// The last holder may be destroyed anywhere: without the GIL, or during garbage collection. So the main thread settles
// the leases when it is next between two instructions.
void settleLeasesSoon(Lease& lease) {
  if (Py_IsInitialized() == 0) {
    return;  // open blocks end with their thread, tensors in the last garbage collection
  }
  if (PyGILState_Check() != 0 && PyErr_Occurred() == nullptr && !lease.isHeld() && switchLease(lease, false)) {
    return;
  }
  if (!is_pending.exchange(true) && Py_AddPendingCall(&settleWhenAsked, nullptr) != 0) {
    is_pending = false;  // the queue is full; the next block or destruction tries again
  }
}

void setActive(Lease& lease, bool is_active) {
  lease.setActive(is_active);
  if (&lease == &leaseOfFakes()) {
    makeGradientsFake(is_active);
  }
}

}  // namespace

bool settleLeases() {
  const auto settle = [](Lease& lease) { return lease.isActive() || !lease.isHeld() || switchLease(lease, true); };
  if (settle(leaseOfRegions()) && settle(leaseOfMarks())) {
    return true;
  }
  PyObject* const done = PyObject_CallOneArg(provided(Provided::kSettleLeases), Py_True);
  Py_XDECREF(done);
  return done != nullptr;
}

void bindLeases(pybind11::module_& module) {
  setLeaseListener(&settleLeasesSoon);
  pybind11::class_<Lease, std::unique_ptr<Lease, pybind11::nodelete>>(module, "Lease")
      .def(pybind11::init([] { return new Lease; }))  // never freed: one per feature
      .def("hold", &Lease::hold)
      .def("release", &Lease::release)
      .def("is_held", &Lease::isHeld)
      .def("is_active", &Lease::isActive)
      .def("set_active", &setActive);
  module.attr("lease_of_fakes") = pybind11::cast(&leaseOfFakes(), pybind11::return_value_policy::reference);
  module.attr("lease_of_marks") = pybind11::cast(&leaseOfMarks(), pybind11::return_value_policy::reference);
  module.attr("lease_of_regions") = pybind11::cast(&leaseOfRegions(), pybind11::return_value_policy::reference);
  module.def("offer_switch", &offerSwitch);
  module.def("withdraw_switches", &withdrawSwitches);
}

}  // namespace torchext::python
