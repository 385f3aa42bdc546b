# It needs a POSIX shell, make and Go. "make test" installs what its tests need
# beside them, if it is missing, from the packages of the system: redis-server, PostgreSQL,
# MariaDB, and a C compiler for the race detector.

SHELL = /bin/sh

# Each module is tested as its users get it. The workspace is for go run at the top.
export GOWORK = off

MODULES = $$(find . -name go.mod -not -path '*/.*/*' -not -path '*/testdata/*' | sort)

.PHONY: help test tools bench bench-quick fmt

help:
	@echo "make test   gofmt, tidy, vet and all tests with the race detector, on a real redis-server"
	@echo "make tools  installs redis-server, PostgreSQL, MariaDB and a C compiler, if missing (test does it first)"
	@echo "make bench  the benchmark beside other libraries, about 12 minutes; bench-quick: under a minute"
	@echo "make fmt    format all Go files"

test: tools
	@set -e; for mod in $(MODULES); do \
		dir=$$(dirname "$$mod"); \
		echo "== $$dir"; \
		( set -e; cd "$$dir"; \
		  files=$$(gofmt -l .); \
		  if [ -n "$$files" ]; then echo "not formatted:"; echo "$$files"; exit 1; fi; \
		  go mod tidy -diff; \
		  go vet ./...; \
		  HOLDFAST_REQUIRE_REDIS=1 CGO_ENABLED=1 go test -race -timeout 15m ./... ); \
	done

# The arguments of install are the names of apt, brew, apk and dnf.
tools:
	@as_root=; \
	if [ "$$(id -u)" -ne 0 ] && command -v sudo >/dev/null 2>&1; then as_root=sudo; fi; \
	has() { command -v "$$1" >/dev/null 2>&1; }; \
	install() { \
		if has apt-get; then \
			$$as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq && \
			$$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$1; \
		elif has brew; then brew install $$2; \
		elif has apk; then $$as_root apk add $$3; \
		elif has dnf; then $$as_root dnf install -y $$4; \
		fi; \
	}; \
	has go || { echo "Go is missing: put it on the PATH" >&2; exit 1; }; \
	if ! has redis-server; then \
		echo "redis-server is missing: installing it"; \
		install redis-server redis redis redis || true; \
		has redis-server || { echo "redis-server could not be installed: put one on the PATH" >&2; exit 1; }; \
	fi; \
	any() { for x in "$$@"; do if command -v "$$x" >/dev/null 2>&1; then return 0; fi; done; return 1; }; \
	if ! any postgres /usr/lib/postgresql/*/bin/postgres; then \
		echo "PostgreSQL is missing: installing it"; \
		install postgresql postgresql postgresql postgresql-server || true; \
		any postgres /usr/lib/postgresql/*/bin/postgres || { echo "PostgreSQL could not be installed: put postgres and initdb on the PATH" >&2; exit 1; }; \
	fi; \
	if ! any mariadbd /usr/sbin/mariadbd; then \
		echo "MariaDB is missing: installing it"; \
		install mariadb-server mariadb mariadb mariadb-server || true; \
		any mariadbd /usr/sbin/mariadbd || { echo "MariaDB could not be installed: put mariadbd and mariadb-install-db on the PATH" >&2; exit 1; }; \
	fi; \
	cc=$$(go env CC); \
	if ! has $$cc; then \
		echo "the race detector needs a C compiler, $$cc is missing: installing it"; \
		install "gcc libc6-dev" gcc "gcc musl-dev" gcc || true; \
		has $$cc || { echo "a C compiler could not be installed: put $$cc on the PATH" >&2; exit 1; }; \
	fi

# Side by side with other libraries; the table goes to standard output.
bench: tools
	cd internal/bench && go run .

bench-quick: tools
	cd internal/bench && go run . -quick

fmt:
	gofmt -w .
