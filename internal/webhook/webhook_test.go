package webhook_test

import (
	"encoding/base64"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/webhook"
)

// The secret, message and signature are the example of the Standard Webhooks libraries.
func TestSignatureIsThatOfStandardWebhooks(t *testing.T) {
	t.Parallel()
	const want = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
	known := testbed.SecretFile(t, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
	other := testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 64)))
	config := webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{known}}, Tenants: map[string]webhook.Secrets{"a": {SecretFiles: []string{other, known}}}}
	sign := func(tenant string) []string {
		h := http.Header{}
		if err := config.Sign(h, tenant, "msg_p5jXN8AQM9LWM0D4loKWxJek", time.Unix(1614265330, 0), []byte(`{"test": 2432232314}`)); err != nil {
			t.Fatal(err)
		}
		if h.Get("Webhook-Id") != "msg_p5jXN8AQM9LWM0D4loKWxJek" || h.Get("Webhook-Timestamp") != "1614265330" {
			t.Errorf("%v", h)
		}
		return strings.Split(h.Get("Webhook-Signature"), " ")
	}
	if got := sign("b"); len(got) != 2 || got[0] != want || got[1] == want {
		t.Errorf("one secret: %q", got)
	}
	if got := sign("a"); len(got) != 2 || got[0] == want || got[1] != want {
		t.Errorf("two secrets: %q", got)
	}
}

func TestTenantsWithoutSecretHaveDerivedOnes(t *testing.T) {
	t.Parallel()
	first, second := testbed.SecretFile(t, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n"), testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 64)))
	config := webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{first, second}}, Tenants: map[string]webhook.Secrets{"own": {SecretFiles: []string{second}}}}
	signatures := func(c webhook.Config, tenant string) []string {
		h := http.Header{}
		if err := c.Sign(h, tenant, "msg", time.Unix(1614265330, 0), []byte("{}")); err != nil {
			t.Fatal(err)
		}
		return strings.Split(h.Get("Webhook-Signature"), " ")
	}
	seen := map[string]string{}
	for _, tenant := range []string{"", "a", "b"} {
		secrets, err := config.DerivedSecrets(tenant)
		if err != nil || len(secrets) != 2 {
			t.Fatalf("%q: %q, %v", tenant, secrets, err)
		}
		for _, secret := range secrets {
			if other, ok := seen[secret]; ok {
				t.Errorf("%q has the secret of %q", tenant, other)
			}
			seen[secret] = tenant
			// A receiver verifies with this secret alone.
			alone := webhook.Config{Tenants: map[string]webhook.Secrets{tenant: {SecretFiles: []string{testbed.SecretFile(t, secret)}}}}
			for _, sender := range []string{"", "a", "b", "own"} {
				verifies := slices.Contains(signatures(config, sender), signatures(alone, tenant)[0])
				if verifies != (sender == tenant) {
					t.Errorf("the secret of %q verifies a call of %q: %t", tenant, sender, verifies)
				}
			}
		}
	}
	if _, err := config.DerivedSecrets("own"); err == nil || !strings.Contains(err.Error(), "tenants.own.secret_files") {
		t.Errorf("a tenant with secrets of its own: %v", err)
	}
	if n := len(signatures(config, "own")); n != 1 {
		t.Errorf("a tenant with a secret of its own has %d signatures", n)
	}
}

func TestBadSecretFileIsReported(t *testing.T) {
	t.Parallel()
	of := func(n int) string { return base64.StdEncoding.EncodeToString(make([]byte, n)) }
	for name, text := range map[string]string{"no prefix": of(32), "short": "whsec_" + of(23), "long": "whsec_" + of(65), "no base64": "whsec_-", "empty": ""} {
		path := testbed.SecretFile(t, text)
		err := webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{path}}}.ReadSecrets()
		if err == nil || !strings.HasPrefix(err.Error(), "secret_files: "+path) || text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, n := range []int{24, 64} {
		if err := (webhook.Config{Secrets: webhook.Secrets{SecretFiles: []string{testbed.SecretFile(t, "whsec_"+of(n))}}}).ReadSecrets(); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestOnlyPublicURLsMayBeWebhooks(t *testing.T) {
	t.Parallel()
	config := webhook.Config{Allow: []string{"Receiver.internal", "10.1.0.0/16", "::1"}}
	for _, url := range []string{
		"https://example.com", "https://example.com:8443/path?a=b", "https://8.8.8.8/", "https://[2606:4700::1111]/", "https://10.1.2.3", "http://10.1.2.3:80/",
		"http://receiver.INTERNAL.:8080/", "http://[::1]:1/", "https://[::ffff:10.1.2.3]/", "https://notlocalhost", "https://localhost.example.com",
	} {
		if err := config.Check(url); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{
		"https://10.2.0.1", "https://127.0.0.1", "https://[::]", "https://0.0.0.0", "https://169.254.169.254/latest", "https://[fe80::1%25eth0]/", "https://192.168.1.1", "https://172.31.0.1",
		"https://[fd00::1]", "https://224.0.0.1", "https://[ff02::1]", "https://255.255.255.255", "https://100.64.0.1", "https://[::ffff:127.0.0.1]", "https://[::127.0.0.1]",
		"https://[64:ff9b::7f00:1]", "https://[64:ff9b:1::7f00:1]", "https://[::ffff:0:127.0.0.1]", "https://[2002:7f00:1::]", "https://[2001::1]", "https://[5f00::1]", "https://0.1.2.3",
		"https://localhost", "https://LocalHost.:8443/path", "https://a.localhost",
	} {
		if err := config.Check(url); !errors.Is(err, webhook.ErrPrivate) {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"", "example.com", "https://", "http://example.com", "ftp://example.com", "https://a:b@example.com", "https://example.com/#a", "https://example.com/" + strings.Repeat("a", 2048), "http://127.0.0.1", "file:///etc/passwd", "https://exa mple.com"} {
		if err := config.Check(url); err == nil || errors.Is(err, webhook.ErrPrivate) {
			t.Errorf("%q: %v", url, err)
		}
	}
}

func TestNameOfAPrivateAddressIsNotDialled(t *testing.T) {
	t.Parallel()
	l := testbed.Listen(t)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, host := range []string{"localhost", "127.0.0.1", "::ffff:127.0.0.1"} {
		if conn, err := (webhook.Config{Allow: []string{"other", "10.0.0.0/8"}}).Dial(t.Context(), "tcp", net.JoinHostPort(host, port)); !errors.Is(err, webhook.ErrPrivate) {
			t.Errorf("%s: %v, %v", host, conn, err)
		}
	}
	for _, allowed := range []string{"LOCALHOST", "127.0.0.0/8", "127.0.0.1"} {
		conn, err := (webhook.Config{Allow: []string{allowed}}).Dial(t.Context(), "tcp4", net.JoinHostPort("localhost", port))
		if err != nil {
			t.Errorf("%s: %v", allowed, err)
			continue
		}
		_ = conn.Close()
	}
}

func TestBadSectionIsRefused(t *testing.T) {
	t.Parallel()
	one := webhook.Secrets{SecretFiles: []string{"a"}}
	for want, config := range map[string]webhook.Config{
		"secret_files: 0":           {},
		"secret_files: 3":           {Secrets: webhook.Secrets{SecretFiles: []string{"a", "b", "c"}}},
		"tenants.a.secret_files: 0": {Secrets: one, Tenants: map[string]webhook.Secrets{"a": {}}},
		"allow[1]":                  {Secrets: one, Allow: []string{"a", "http://b"}},
		"max_in_flight":             {Secrets: one, MaxInFlight: -1},
	} {
		if err := config.Validate(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if err := (webhook.Config{Secrets: one, Allow: []string{"a", "10.0.0.1", "fd00::/8"}}).Validate(); err != nil {
		t.Error(err)
	}
}
