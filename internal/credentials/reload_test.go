package credentials_test

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func replace(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tokenFile returns a file with the token open-sesame, its log, and what says which tokens are accepted.
func tokenFile(t *testing.T) (path string, log *testbed.Log, accepts func(token string) bool) {
	t.Helper()
	path, log = testbed.SecretFile(t, "open-sesame one\n"), &testbed.Log{}
	tokens, err := credentials.ReadTokens(path, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return path, log, func(token string) bool {
		_, ok := tokens.Holder(token)
		return ok
	}
}

func TestTokensAreReplacedWithoutARestart(t *testing.T) {
	t.Parallel()
	path, log, accepts := tokenFile(t)
	if !accepts("open-sesame") || accepts("open-simsim") {
		t.Fatal("the tokens are not those of the file")
	}
	replace(t, path, "open-sesame one\nopen-simsim two\n")
	testbed.Eventually(t, "a new token is accepted beside the old one", func() bool { return accepts("open-simsim") && accepts("open-sesame") })
	replace(t, path, "open-simsim two\n")
	testbed.Eventually(t, "the old token is refused", func() bool { return !accepts("open-sesame") })
	replace(t, path, "\n")
	testbed.Eventually(t, "a bad file is logged", func() bool {
		accepts("open-simsim")
		return strings.Contains(log.String(), "there is no token in it")
	})
	if !accepts("open-simsim") || strings.Contains(log.String(), "simsim") {
		t.Errorf("a bad file has taken the tokens away, or they are in the log:\n%s", log)
	}
}

// A change of the owner of a file leaves its size and time.
func TestUnreadableTokensAreTriedAgain(t *testing.T) {
	t.Parallel()
	path, log, accepts := tokenFile(t)
	good, at := "open-simsim two\n", time.Unix(1000, 0)
	set := func(text string) {
		t.Helper()
		next := testbed.SecretFile(t, text)
		if err := errors.Join(os.Chtimes(next, at, at), os.Rename(next, path)); err != nil {
			t.Fatal(err)
		}
	}
	set(strings.Repeat("\n", len(good)))
	testbed.Eventually(t, "a bad file is logged", func() bool {
		return accepts("open-sesame") && strings.Contains(log.String(), "there is no token in it")
	})
	set(good)
	testbed.Eventually(t, "the file is read", func() bool { return accepts("open-simsim") })
	if n := strings.Count(log.String(), "there is no token in it"); n != 1 {
		t.Errorf("it was logged %d times", n)
	}
}

func TestCertificatesAreReplacedWithoutARestart(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("one")
	config, err := credentials.Pair{CertFile: cert, KeyFile: key}.Server("", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	serves := func(name string) bool {
		certificate, err := config.GetCertificate(&tls.ClientHelloInfo{})
		return err == nil && certificate.Leaf.Subject.CommonName == name
	}
	if !serves("one") {
		t.Fatal("another certificate")
	}
	newCert, newKey := authority.Certificate("two")
	for from, to := range map[string]string{newCert: cert, newKey: key} {
		data := testbed.ReadFile(t, from)
		replace(t, to, string(data))
		testbed.Eventually(t, "a certificate without its key is not used", func() bool { return serves("one") || serves("two") })
	}
	testbed.Eventually(t, "the new certificate is served", func() bool { return serves("two") })
}
