package credentials_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPairErrorsNameTheRightFile(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("one")
	_, other := authority.Certificate("other")
	for name, test := range map[string]struct{ cert, key, want string }{
		"no certificate":           {"nowhere", key, "nats.cert_file: open nowhere: "},
		"no key":                   {cert, "nowhere", "nats.key_file: open nowhere: "},
		"a certificate as the key": {cert, cert, "nats.key_file: " + cert + ": there is no private key in it"},
		"a key as the certificate": {key, key, "nats.cert_file: tls: "},
		"the key of another":       {cert, other, "nats.cert_file: tls: "},
	} {
		if _, err := (credentials.Pair{CertFile: test.cert, KeyFile: test.key}).Load("nats."); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (credentials.Pair{CertFile: cert, KeyFile: key}).Load(""); err != nil {
		t.Error(err)
	}
	if err := (credentials.Pair{CertFile: "c"}).Check("nats."); err == nil || err.Error() != "nats.cert_file: has no key; name its file in nats.key_file" {
		t.Error(err)
	}
	if err := (credentials.Pair{KeyFile: "k"}).Check(""); err == nil || err.Error() != "key_file: has no certificate; name its file in cert_file" {
		t.Error(err)
	}
}

func TestTokenIsOneWord(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"open-sesame\n": "", " \n": "there is no token in it", "open\nsesame": "one word of visible ASCII",
		"s\u00e9same": "one word of visible ASCII", strings.Repeat("x", 1<<20+1): "larger than 1048576 bytes",
	} {
		path := testbed.SecretFile(t, text)
		_, err := credentials.Token(path)
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), path+": ")) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
	if _, err := credentials.Token("nowhere"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestRootsAreCertificates(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	_, key := authority.Certificate("one")
	if roots, err := credentials.Roots(authority.File); err != nil || !roots.Equal(authority.Roots) {
		t.Error(err)
	}
	if _, err := credentials.Roots(key); err == nil || err.Error() != key+": there is no certificate in it" {
		t.Error(err)
	}
}
