// Package fronttest is what the tests of the fronts share: a Caller that is
// told what to answer, a fault that carries everything a fault can, and a
// server on a real port with the protocols of the product. It is linked into
// no program.
package fronttest
