// Package tensor holds dense tensors the way they travel through the mesh:
// a datatype and shape in the vocabulary of the Open Inference Protocol, and
// raw little-endian row-major bytes.
//
// A Tensor is a plain value; its Raw bytes are shared, not copied, by Rows,
// Split and the typed constructors' inputs where the platform allows. Treat a
// tensor that came from a request as read-only.
//
// Axis 0 is rows. Concat joins tensors that agree on datatype and trailing
// shape along it; Split hands the rows back.
//
// Everything here is safe for concurrent use as long as nobody writes to Raw.
// Functions that take bytes from outside return an error and never panic.
package tensor
