#include "leases.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torchext/fake_tensor.h>

#include "../core/fake/fake.h"
#include "../core/fake/storage/fake_storage.h"
#include "../extensions/marks/tensor_marks.h"
#include "../libraries/support/sizes.h"
#include "bind.h"
#include "interpreter.h"
#include "module.h"

namespace torchext::python {

namespace {

// NOTE [Replaced C functions]
//
// A C function in Python is an object that points to a definition. Replacing the function changes this object. It keeps
// its identity, name, documentation and kind for all references, pickles and tables.
//
// - A method of a C type (a `method_descriptor`) gets another `PyMethodDef`, also for `tensor.method`, which creates a
//   function from the definition. CPython does not pass the definition to the function that it points to, so each
//   replaced method has its own trampoline. The calling convention stays that of the original: CPython chose by it how
//   to call the object when that was created. It also raises the errors for wrong numbers of arguments.
// - A builtin, including those of pybind11, is compared and hashed by the C function of its definition, which must
//   stay. So it gets another vectorcall function, which receives the called object.
// - A property (a `getset_descriptor`) gets another `PyGetSetDef`, which can store a pointer to the slot.
// - The `__new__` of a C type is its `tp_new`, which derived classes have copied. So it is exchanged in all of them.
//   `T.__new__` stays the same object and calls the current `tp_new`.
//
// A replacement declares which calls concern it. All others go directly to the original, without Python: calls with
// real tensors do not become slower.
//
// torchext/internals/patching.py declares the replacements.

// Bits of `Slot::concerns`.
enum Concerns : unsigned {
  kFakes = 1U,  // an argument is a fake tensor, its storage, or the memo of a copy that makes fakes
  kMarks = 2U,  // an argument is a marked tensor
  kAll = 4U,
};

struct Slot {
  PyObject* function = nullptr;  // the replaced object, held permanently
  PyObject* original = nullptr;  // another object with the same definition, which stays unreplaced
  PyObject* called = nullptr;    // the replacement, or `original` for methods that were bound before
  bool passes_self = false;      // whether a method passes its first argument
  unsigned concerns = kAll;      // the calls that concern the replacement
  PyMethodDef* original_definition = nullptr;
  PyMethodDef definition{};
  vectorcallfunc original_vectorcall = nullptr;
  PyGetSetDef* original_property = nullptr;
  PyGetSetDef property{};
  newfunc original_new = nullptr;
};

constexpr std::size_t kSlots = 128;

// Slots are never moved or freed: calls may be in flight.
std::array<Slot, kSlots>& slots() {
  static auto* all = new std::array<Slot, kSlots>;
  return *all;
}

// Checks the type: `torch::isStorage()` also reads `__class__`.
bool isTypedStorage(PyObject* object) {
  PyObject* type = provided(Provided::kTypedStorage);
  return type != nullptr && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type)) != 0;
}

bool isAbout(unsigned concerns, PyObject* argument) {
  if (argument == nullptr) {
    return false;
  }
  if (isStorage(argument) || isTypedStorage(argument)) {
    return (concerns & kFakes) != 0 && isFakeStorage(torch::createStorage(argument));
  }
  if (isTensor(argument)) {
    const at::Tensor& tensor = THPVariable_Unpack(argument);
    return ((concerns & kFakes) != 0 && isFake(tensor)) ||
           ((concerns & kMarks) != 0 && tensor.defined() && tensor.key_set().has(kMarksKey));
  }
  return (concerns & kFakes) != 0 && reinterpret_cast<PyObject*>(Py_TYPE(argument)) == provided(Provided::kFakeCopy);
}

bool isAboutAnyOf(unsigned concerns, PyObject* const* args, Py_ssize_t count) {
  return (concerns & kAll) != 0 ||
         std::any_of(args, args + count, [concerns](PyObject* argument) { return isAbout(concerns, argument); });
}

// The arguments of a call, which its caller holds. `keywords` is null, or a dictionary, or the names of the last values
// in `args`, which follow `count` positional ones.
struct Call {
  PyObject* self;
  PyObject* const* args;
  Py_ssize_t count;
  PyObject* keywords = nullptr;

  bool hasDict() const {
    return keywords != nullptr && PyDict_Check(keywords);
  }
  Py_ssize_t named() const {
    return keywords == nullptr || hasDict() ? 0 : PyTuple_GET_SIZE(keywords);
  }
};

Call callOf(PyObject* self, PyObject* args, PyObject* kwargs) {
  return {self, reinterpret_cast<PyTupleObject*>(args)->ob_item, PyTuple_GET_SIZE(args), kwargs};
}

bool isAboutCall(const Slot& slot, const Call& call) {
  if (isAbout(slot.concerns, call.self) || isAboutAnyOf(slot.concerns, call.args, call.count + call.named())) {
    return true;
  }
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t i = 0; call.hasDict() && PyDict_Next(call.keywords, &i, &name, &value) != 0;) {
    if (isAbout(slot.concerns, value)) {
      return true;
    }
  }
  return false;
}

PyObject* callReplacement(const Slot& slot, const Call& call) {
  std::vector<PyObject*> all{nullptr};  // CPython may write to it: `PY_VECTORCALL_ARGUMENTS_OFFSET`
  all.reserve(toSize(call.count + call.named()) + 2);
  if (slot.passes_self) {
    all.push_back(call.self);
  }
  all.insert(all.end(), call.args, call.args + call.count + call.named());
  const auto positional = (all.size() - 1 - toSize(call.named())) | PY_VECTORCALL_ARGUMENTS_OFFSET;
  PyObject* const called = slot.called;
  Py_INCREF(called);  // may be restored during the call
  const auto function = call.hasDict() ? &PyObject_VectorcallDict : &PyObject_Vectorcall;
  PyObject* result = function(called, all.data() + 1, positional, call.keywords);
  Py_DECREF(called);
  return result;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
using FastFunctionWithKeywords = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

// Calls the replacement of a method if it concerns the call, and the original with `arguments` otherwise.
template <typename Function, typename... Arguments>
PyObject* callMethod(std::size_t index, const Call& call, Arguments... arguments) {
  const Slot& slot = slots()[index];
  if (isAboutCall(slot, call)) {
    return callReplacement(slot, call);
  }
  const auto original = reinterpret_cast<void (*)()>(slot.original_definition->ml_meth);
  return reinterpret_cast<Function>(original)(call.self, arguments...);
}

// One function per calling convention.
template <std::size_t kIndex>
struct Trampoline {
  static PyObject* variableWithKeywords(PyObject* self, PyObject* args, PyObject* kwargs) {
    return callMethod<PyCFunctionWithKeywords>(kIndex, callOf(self, args, kwargs), args, kwargs);
  }
  static PyObject* variable(PyObject* self, PyObject* args) {
    return callMethod<PyCFunction>(kIndex, callOf(self, args, nullptr), args);
  }
  static PyObject* none(PyObject* self, PyObject* unused) {
    return callMethod<PyCFunction>(kIndex, {self, nullptr, 0}, unused);
  }
  static PyObject* one(PyObject* self, PyObject* argument) {
    return callMethod<PyCFunction>(kIndex, {self, &argument, 1}, argument);
  }
  static PyObject* fast(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return callMethod<FastFunction>(kIndex, {self, args, count}, args, count);
  }
  static PyObject* fastWithKeywords(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    return callMethod<FastFunctionWithKeywords>(kIndex, {self, args, count, names}, args, count, names);
  }
};

template <typename Function>
PyCFunction asMethod(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Returns null for any other convention.
template <std::size_t kIndex>
PyCFunction trampolineFor(unsigned flags) {
  switch (flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL | METH_METHOD)) {
    case METH_VARARGS | METH_KEYWORDS:
      return asMethod(&Trampoline<kIndex>::variableWithKeywords);
    case METH_VARARGS:
      return asMethod(&Trampoline<kIndex>::variable);
    case METH_NOARGS:
      return asMethod(&Trampoline<kIndex>::none);
    case METH_O:
      return asMethod(&Trampoline<kIndex>::one);
    case METH_FASTCALL:
      return asMethod(&Trampoline<kIndex>::fast);
    case METH_FASTCALL | METH_KEYWORDS:
      return asMethod(&Trampoline<kIndex>::fastWithKeywords);
    default:
      return nullptr;
  }
}

template <std::size_t... kIndices>
PyCFunction trampoline(std::size_t slot, unsigned flags, std::index_sequence<kIndices...> /*unused*/) {
  using Choose = PyCFunction (*)(unsigned);
  static constexpr std::array<Choose, sizeof...(kIndices)> kChoices{&trampolineFor<kIndices>...};
  return kChoices.at(slot)(flags);
}

PyObject* getProperty(PyObject* self, void* slot) {
  const auto& of = *static_cast<const Slot*>(slot);
  const Call call{nullptr, &self, 1};
  return isAboutCall(of, call) ? callReplacement(of, call)
                               : of.original_property->get(self, of.original_property->closure);
}

PyObject* newObject(PyTypeObject* type, PyObject* args, PyObject* kwargs);
Slot& slotOf(PyObject* function);

// A type stands for its `__new__`.
bool isType(PyObject* function) {
  return PyType_Check(function);
}

PyTypeObject* asType(PyObject* type) {
  return reinterpret_cast<PyTypeObject*>(type);
}

bool isBuiltin(PyObject* function) {
  return PyObject_TypeCheck(function, &PyCFunction_Type);
}

bool isMethod(PyObject* function) {
  return PyObject_TypeCheck(function, &PyMethodDescr_Type) || PyObject_TypeCheck(function, &PyClassMethodDescr_Type);
}

bool isProperty(PyObject* function) {
  return PyObject_TypeCheck(function, &PyGetSetDescr_Type);
}

// The pointer of the object to its definition.
PyMethodDef*& definitionOf(PyObject* function) {
  return isBuiltin(function) ? reinterpret_cast<PyCFunctionObject*>(function)->m_ml
                             : reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
}

vectorcallfunc& vectorcallOf(PyObject* function) {
  return reinterpret_cast<PyCFunctionObject*>(function)->vectorcall;
}

PyGetSetDef*& propertyOf(PyObject* function) {
  return reinterpret_cast<PyGetSetDescrObject*>(function)->d_getset;
}

// `T.__new__` while it is not replaced, like CPython's `tp_new_wrapper`. `self` is the type of the slot.
PyObject* callOriginalNew(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* const type = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : Py_None;
  if (!PyType_Check(type) || !PyType_IsSubtype(asType(type), asType(self))) {
    return PyErr_Format(PyExc_TypeError, "__new__() expected a subtype of %s as the first argument.",
                        asType(self)->tp_name);
  }
  PyObject* const others = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
  PyObject* const made = others == nullptr ? nullptr : slotOf(self).original_new(asType(type), others, kwargs);
  Py_XDECREF(others);
  return made;
}

PyObject* makeOriginal(PyObject* function) {
  if (isType(function)) {
    static PyMethodDef definition{"__new__", asMethod(&callOriginalNew), METH_VARARGS | METH_KEYWORDS, nullptr};
    return PyCFunction_NewEx(&definition, function, nullptr);
  }
  if (isProperty(function)) {
    return PyDescr_NewGetSet(PyDescr_TYPE(function), propertyOf(function));
  }
  if (PyObject_TypeCheck(function, &PyClassMethodDescr_Type)) {
    return PyDescr_NewClassMethod(PyDescr_TYPE(function), definitionOf(function));
  }
  if (isMethod(function)) {
    return PyDescr_NewMethod(PyDescr_TYPE(function), definitionOf(function));
  }
  const auto* const builtin = reinterpret_cast<PyCFunctionObject*>(function);
  return PyCFunction_NewEx(builtin->m_ml, builtin->m_self, builtin->m_module);
}

void fill(Slot& slot, std::size_t index, PyObject* function) {
  if (isType(function)) {
    slot.original_new = asType(function)->tp_new;
    slot.passes_self = true;
  } else if (isProperty(function)) {
    slot.original_property = propertyOf(function);
    slot.property = *slot.original_property;
    slot.property.get = &getProperty;
    slot.property.closure = &slot;
  } else {
    slot.original_definition = definitionOf(function);
    slot.definition = *slot.original_definition;
    slot.passes_self = isMethod(function);
    if (isBuiltin(function)) {
      // CPython's instructions for single calling conventions compare these flags and skip the vectorcall if they
      // match. METH_COEXIST has no effect on an existing function.
      slot.definition.ml_flags = static_cast<int>(static_cast<unsigned>(slot.definition.ml_flags) | METH_COEXIST);
      slot.original_vectorcall = vectorcallOf(function);
    } else {
      slot.definition.ml_meth =
          trampoline(index, static_cast<unsigned>(slot.definition.ml_flags), std::make_index_sequence<kSlots>{});
    }
    if (slot.definition.ml_meth == nullptr) {
      throw pybind11::type_error("The calling convention of the C function is not supported.");
    }
  }
  slot.original = makeOriginal(function);
  if (slot.original == nullptr) {
    throw pybind11::error_already_set();
  }
  slot.called = slot.original;
  Py_INCREF(slot.called);
  Py_INCREF(function);
  slot.function = function;
}

// Returns the type that defines the `tp_new` of `type`.
PyTypeObject* ownerOfNew(PyTypeObject* type) {
  while (type->tp_base != nullptr && type->tp_base->tp_new == type->tp_new) {
    type = type->tp_base;
  }
  return type;
}

// Not thread-safe: torchext/internals/patching.py holds a lock.
Slot& slotOf(PyObject* function) {
  static auto* known = new std::unordered_map<PyObject*, std::size_t>;
  if (PyType_Check(function)) {
    function = reinterpret_cast<PyObject*>(ownerOfNew(asType(function)));
  }
  const auto found = known->find(function);
  if (found != known->end()) {
    return slots()[found->second];
  }
  if (!isMethod(function) && !isProperty(function) && !isBuiltin(function) && !isType(function)) {
    throw pybind11::type_error(std::string("expected a C function, got ") + Py_TYPE(function)->tp_name + ".");
  }
  const std::size_t index = known->size();
  if (index == kSlots) {
    throw pybind11::value_error("No slot is left for a replaced function. Raise kSlots in patching.cpp.");
  }
  fill(slots().at(index), index, function);
  known->emplace(function, index);
  return slots().at(index);
}

PyObject* callBuiltin(PyObject* function, PyObject* const* args, std::size_t count, PyObject* keyword_names) {
  const Slot& slot = slotOf(function);
  const Call call{nullptr, args, PyVectorcall_NARGS(count), keyword_names};
  // `original` has no vectorcall itself if it takes a tuple.
  return isAboutCall(slot, call) ? callReplacement(slot, call)
                                 : PyObject_Vectorcall(slot.original, args, count, keyword_names);
}

// Returns the slot for a type that derives from one whose `__new__` is, or was, replaced.
const Slot& slotOfNew(PyTypeObject* type) {
  const auto* const found = std::find_if(slots().begin(), slots().end(), [type](const Slot& slot) {
    return slot.original_new != nullptr && PyType_IsSubtype(type, asType(slot.function)) != 0;
  });
  TORCH_INTERNAL_ASSERT(found != slots().end());
  return *found;
}

PyObject* newObject(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  const Slot& slot = slotOfNew(type);
  const Call call = callOf(reinterpret_cast<PyObject*>(type), args, kwargs);
  return isAboutCall(slot, call) ? callReplacement(slot, call) : slot.original_new(type, args, kwargs);
  END_HANDLE_TH_ERRORS
}

// Exchanges it in `type`, and in derived types with the same `tp_new`. CPython reads it for each call, except that of
// `object`, which is never replaced, so nothing that it caches of the type changes.
void exchangeNew(PyTypeObject* type, newfunc expected, newfunc function) {
  if (type->tp_new == expected) {
    type->tp_new = function;
  }
  const auto find = pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(&PyType_Type));
  for (const pybind11::handle derived :
       find.attr("__subclasses__")(pybind11::handle(reinterpret_cast<PyObject*>(type)))) {
    exchangeNew(asType(derived.ptr()), expected, function);
  }
}

// Returns an object that calls the original, whether it is replaced or not.
pybind11::object originalOf(const pybind11::object& function) {
  return pybind11::reinterpret_borrow<pybind11::object>(slotOf(function.ptr()).original);
}

// `None` restores the original. For `concerns`, see `Concerns`.
void replaceFunction(PyObject* function, PyObject* replacement, unsigned concerns) {
  Slot& slot = slotOf(function);
  slot.concerns = concerns;
  const bool is_replaced = replacement != Py_None;
  PyObject* const previous = std::exchange(slot.called, is_replaced ? replacement : slot.original);
  Py_INCREF(slot.called);
  if (slot.original_new != nullptr) {
    exchangeNew(asType(slot.function), is_replaced ? slot.original_new : &newObject,
                is_replaced ? &newObject : slot.original_new);
  } else if (slot.original_property != nullptr) {
    propertyOf(slot.function) = is_replaced ? &slot.property : slot.original_property;
  } else {
    definitionOf(slot.function) = is_replaced ? &slot.definition : slot.original_definition;
    if (isBuiltin(slot.function)) {
      vectorcallOf(slot.function) = is_replaced ? &callBuiltin : slot.original_vectorcall;
    }
  }
  Py_DECREF(previous);
}

// `is_about(concerns, *arguments)`, for the arguments of Python functions.
PyObject* isAboutArguments(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count < 1) {
    return PyErr_Format(PyExc_TypeError, "is_about() expected `concerns` as the first argument.");
  }
  const unsigned long concerns = PyLong_AsUnsignedLong(args[0]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  return PyBool_FromLong(isAboutAnyOf(static_cast<unsigned>(concerns), args + 1, count - 1) ? 1 : 0);
  END_HANDLE_TH_ERRORS
}

// For the self-test in torchext/internals/patching.py: a function whose calls CPython specializes.
PyObject* identity(PyObject* /*module*/, PyObject* value) {
  return Py_NewRef(value);
}

}  // namespace

// Callees before their callers. A garbage collection would call finalizers, which could let other threads run.
void exchange(const pybind11::tuple& steps) {
  const bool collects = PyGC_Disable() != 0;
  const auto restore = c10::make_scope_exit([collects] {
    if (collects) {
      PyGC_Enable();
    }
  });
  const auto item = [](pybind11::handle step, Py_ssize_t i) { return PyTuple_GET_ITEM(step.ptr(), i); };
  const auto set = [&item](pybind11::handle step, PyObject* name, PyObject* value) {
    PyObject* const given = value == Py_Ellipsis ? nullptr : value;  // null deletes
    if (PyObject_SetAttr(item(step, 0), name, given) != 0) {
      throw pybind11::error_already_set();
    }
  };
  static PyObject* const attributes = PyUnicode_InternFromString("__dict__");
  static PyObject* const code = PyUnicode_InternFromString("__code__");
  for (const pybind11::handle step : pybind11::list(steps[0])) {
    const auto present = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(item(step, 0), attributes));
    if (present.attr("get")(pybind11::handle(item(step, 1)), pybind11::ellipsis())
            .is(pybind11::handle(item(step, 2)))) {
      set(step, item(step, 1), item(step, 3));
    }
  }
  for (const pybind11::handle step : pybind11::list(steps[1])) {
    replaceFunction(item(step, 0), item(step, 1), static_cast<unsigned>(PyLong_AsUnsignedLong(item(step, 2))));
  }
  for (const pybind11::handle step : pybind11::list(steps[2])) {
    if (PyFunction_GetCode(item(step, 0)) == item(step, 1)) {
      set(step, code, item(step, 2));
    }
  }
}

void bindPatching(pybind11::module_& module) {
  module.attr("CONCERNS_FAKES") = static_cast<unsigned>(kFakes);
  module.attr("CONCERNS_MARKS") = static_cast<unsigned>(kMarks);
  module.attr("CONCERNS_ALL") = static_cast<unsigned>(kAll);
  static PyMethodDef is_about{"is_about", asMethod(&isAboutArguments), METH_FASTCALL,
                              "is_about(concerns: int, *arguments) -> bool"};
  addFunction(module, is_about);
  static PyMethodDef identity_definition{"identity", &identity, METH_O, "identity(value: object) -> object"};
  addFunction(module, identity_definition);
  module.def("original_of", &originalOf);
  module.def("exchange", &exchange);
}

}  // namespace torchext::python
