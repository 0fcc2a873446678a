// Package fronttest supports the tests of the fronts: a fake Caller with configured
// answers, a fault with every field set, and a server on a real port with the
// protocols of the product. No program links it.
package fronttest
