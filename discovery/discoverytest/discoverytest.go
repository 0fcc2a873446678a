package discoverytest

import (
	"math/rand/v2"
	"strconv"
	"testing"
)

// Start starts a store. One that is not alone may be shared by several tests, which
// do not stop it.
type Start func(t testing.TB, alone bool) Store

// suite is one run of all tests, whose keys and services no other run has.
type suite struct{ run string }

// Test runs every promise.
func Test(t *testing.T, start Start) {
	t.Helper()
	u := suite{run: strconv.FormatUint(rand.Uint64(), 36)} //nolint:gosec // it keeps no secret
	for _, promise := range []struct {
		name  string
		test  func(t *testing.T, s Store)
		alone bool
	}{
		{"RevisionsGuardEntries", u.testRevisionsGuardEntries, false},
		{"KeysAreAnyText", u.testKeysAreAnyText, false},
		{"BoundsAreToldBeforeTheStore", u.testBoundsAreToldBeforeTheStore, false},
		{"ACommitIsMadeWholeOrNotAtAll", u.testACommitIsMadeWholeOrNotAtAll, false},
		{"AListHasCommitsWhole", u.testAListHasCommitsWhole, false},
		{"NoWriterLosesAnUpdate", u.testNoWriterLosesAnUpdate, false},
		{"AnObserverIsToldAllAndThenChanges", u.testAnObserverIsToldAllAndThenChanges, false},
		{"AnObserverConvergesAfterTheStoreIsBack", u.testAnObserverConvergesAfterTheStoreIsBack, true},
		{"TenThousandKeys", u.testTenThousandKeys, false},
		{"InstancesComeAndGo", u.testInstancesComeAndGo, false},
		{"AnInstanceIsAskedHowItIs", u.testAnInstanceIsAskedHowItIs, false},
		{"AnInstanceOutlivesItsStore", u.testAnInstanceOutlivesItsStore, true},
		{"WhatIsNoInstanceIsRefused", u.testWhatIsNoInstanceIsRefused, false},
		{"EverythingEndsWithItsContext", u.testEverythingEndsWithItsContext, true},
	} {
		t.Run(promise.name, func(t *testing.T) {
			t.Parallel()
			promise.test(t, start(t, promise.alone))
		})
	}
}
