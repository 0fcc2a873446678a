package natskv

import (
	"testing"
	"testing/synctest"
	"time"
)

// A broker that answers late is asked more often than one to which there is no connection.
func TestLateAnswersAreWaitedForLonger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tried := newAttempts()
		for n, want := range []bool{false, false, true, true} {
			if got := tried.areOver(errLost); got != want {
				t.Errorf("after %d lost answers: over is %t", n+1, got)
			}
			<-time.After(answerTimeout + time.Nanosecond)
		}
		tried = newAttempts()
		if tried.areOver(errUnsent) {
			t.Error("it does not wait for a connection")
		}
		<-time.After(patience + time.Nanosecond)
		if !tried.areOver(errUnsent) {
			t.Error("it waits for a connection for longer than its patience")
		}
	})
}
