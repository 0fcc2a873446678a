package consultest

// TLS returns an edit that gives an agent a port with TLS beside its plain one, and
// where that is. The agent shows the certificate, and asks those instances alone that
// have one of the authority. All are files.
func TLS(authority, cert, key string) (edit func(c Config), addr string, err error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, "", err
	}
	return func(c Config) {
		if own, ok := c["ports"].(Config); ok {
			own["https"] = ports[0]
		}
		c["enable_agent_tls_for_checks"] = true
		c["tls"] = Config{"defaults": Config{"ca_file": authority, "cert_file": cert, "key_file": key}}
	}, local(ports[0]), nil
}
