// How XLA hands a kernel its arrays.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "arrays.h"
#include "scratch.h"
#include "threads.h"
#include "xla/ffi/api/c_api.h"

namespace {

// Reads a call's arrays one after the other, as gated.py, gato.py, two_layer.py and kernel.py list
// them.
class Reader {
 public:
  explicit Reader(const XLA_FFI_CallFrame* frame) : frame_(frame) {}
  const int64_t* dims() const { return argument(argument_).dims; }  // of what is read next
  float* in() { return static_cast<float*>(argument(argument_++).data); }
  const int32_t* whole_numbers() {
    return static_cast<const int32_t*>(argument(argument_++).data);
  }
  const int64_t* result_dims() const { return result(result_).dims; }
  float* out() {
    const XLA_FFI_Buffer& made = result(result_++);
    int64_t bytes = sizeof(float);
    for (int64_t n = 0; n < made.rank; ++n) bytes *= made.dims[n];
    ask_for_large_pages(made.data, bytes);
    return static_cast<float*>(made.data);
  }
  int64_t attribute(const char* name) const {
    for (int64_t n = 0; n < frame_->attrs.size; ++n) {
      const XLA_FFI_ByteSpan& span = *frame_->attrs.names[n];
      if (span.len == std::strlen(name) && std::memcmp(span.ptr, name, span.len) == 0)
        return *static_cast<int64_t*>(static_cast<XLA_FFI_Scalar*>(frame_->attrs.attrs[n])->value);
    }
    std::abort();  // kernel.py gives them all
  }

 private:
  const XLA_FFI_Buffer& argument(int64_t n) const {
    return *static_cast<XLA_FFI_Buffer*>(frame_->args.args[n]);
  }
  const XLA_FFI_Buffer& result(int64_t n) const {
    return *static_cast<XLA_FFI_Buffer*>(frame_->rets.rets[n]);
  }
  const XLA_FFI_CallFrame* frame_;
  int64_t argument_ = 0, result_ = 0;
};

inline int threads_of(const XLA_FFI_CallFrame* frame, const Reader& read) {
  return std::min<int64_t>(read.attribute("threads"), pool_threads(frame));
}

// XLA asks once for the version of the interface.
inline bool answers_metadata(XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;  // whose type has had two names
  if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata =
      reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

// Runs a kernel, or answers XLA's question for the version of the interface.
template <typename Run>
XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame, Run run) {
  if (answers_metadata(frame)) return nullptr;
  try {
    run(frame);
  } catch (const std::bad_alloc&) {  // XLA's callers know no exceptions
    XLA_FFI_Error_Create_Args args{};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = "recurrent_gates: no memory is left for a kernel to work in.";
    args.errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    return frame->api->XLA_FFI_Error_Create(&args);
  }
  return nullptr;
}

}  // namespace
