// Package redistest starts real redis-servers for tests: single ones, a Sentinel
// set, a cluster. Each has a free loopback port and a folder of its own, can be
// stopped, killed and restarted, and ends with the test that started it, also when
// that fails or its process is killed (the latter on Linux).
package redistest
