// Package reference holds what a gateway says of itself, its OpenAPI document and the
// page that shows it, against what it does: its tests run a mesh in their process, send
// what the document describes, and open the page in a real browser.
//
// The browser is Chromium, by any of its usual names; it has a profile of its own, which
// ends with its test. A machine without one fails the tests that need it. The others
// run alone by -run Document.
package reference
