//! Reads the URL of the database. Computes the address to which the proxy connects, and the URL that the service gets.

use std::net::SocketAddr;
use std::str::FromStr as _;

use sqlx::ConnectOptions as _;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use url::Url;

use crate::Error;
use crate::proxy::{Trust, Upstream};
use crate::wire::Address;

/// Parameters that describe the connection to the server. The service does not get these parameters, because it
/// connects to the proxy.
const OF_THE_WAY: [&str; 13] = [
    "channel_binding",
    "dbname",
    "gssencmode",
    "host",
    "hostaddr",
    "password",
    "port",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "user",
];

pub(crate) struct Database {
    pub(crate) options: PgConnectOptions,
    url: Url,
}

impl Database {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let not_postgres = || {
            Error::Argument("the database has to be a URL of PostgreSQL, such as postgres://user@host/shop".to_owned())
        };
        let url = Url::parse(text).map_err(|_| not_postgres())?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(not_postgres());
        }
        let options = PgConnectOptions::from_str(text).map_err(|_| not_postgres())?;
        Ok(Self { options, url })
    }

    pub(crate) fn upstream(&self) -> Result<Upstream, Error> {
        let address = Address::of(&self.options);
        let parameters = self.url.query_pairs();
        let authorities =
            parameters.into_iter().find(|(key, _)| key == "sslrootcert").map(|(_, value)| value.into_owned());
        let trust = match self.options.get_ssl_mode() {
            PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer => return Ok(Upstream::plain(address)),
            PgSslMode::Require if authorities.is_none() => Trust::Anything,
            // With `require` and `verify-ca`, libpq does not verify the host name. This program is stricter, and
            // verifies the host name in these two modes, too.
            PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull => Trust::Verified(authorities),
        };
        Upstream::encrypted(address, trust).map_err(Error::Proxy)
    }

    /// The URL for the service. The user, the password, the database and the settings are those of the original URL.
    /// The address is that of the proxy.
    pub(crate) fn through(&self, proxy: SocketAddr) -> String {
        let resolved = self.options.to_url_lossy();
        let mut url = Url::parse("postgres://127.0.0.1").unwrap_or_else(|_| self.url.clone());
        // These setters cannot fail on a URL with a host.
        let _ = url.set_host(Some(&proxy.ip().to_string()));
        let _ = url.set_port(Some(proxy.port()));
        let _ = url.set_username(resolved.username());
        let _ = url.set_password(resolved.password());
        url.set_path(self.options.get_database().unwrap_or(self.options.get_username()));
        {
            let mut pairs = url.query_pairs_mut();
            for (key, value) in self.url.query_pairs().filter(|(key, _)| !OF_THE_WAY.contains(&&**key)) {
                pairs.append_pair(&key, &value);
            }
            pairs.append_pair("sslmode", "disable");
        }
        url.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_is_given_the_same_database_through_the_proxy() {
        let database = Database::parse(
            "postgresql://ada:p%40ss@db.example:6432/shop?sslmode=verify-full&sslrootcert=/ca.pem&application_name=a",
        )
        .expect("a URL");
        assert_eq!(
            database.through(([127, 0, 0, 1], 9999).into()),
            "postgres://ada:p%40ss@127.0.0.1:9999/shop?application_name=a&sslmode=disable"
        );
        let on_a_socket = Database::parse("postgres:///shop?host=/run/pg&user=ada").expect("a URL");
        let url = on_a_socket.through(([127, 0, 0, 1], 9999).into());
        assert_eq!(url, "postgres://ada@127.0.0.1:9999/shop?sslmode=disable");
    }

    #[test]
    fn another_url_is_refused_in_one_sentence() {
        for text in ["mysql://a/b", "shop", ""] {
            let error = Database::parse(text).err().expect("refused").in_one_line();
            assert!(error.starts_with("the database has to be a URL of PostgreSQL"), "{error}");
        }
    }
}
