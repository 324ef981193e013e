//! The HTTP server at the configured `listen` address: the probes, the metrics and the page.

use super::views::Views;
use super::{measures, page};
use crate::config::{Config, Roots};
use crate::telemetry::http::{self, Pages};
use crate::telemetry::{Readers, Reviews, Tls, Token};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Where the problems of the server are published.
#[derive(Debug, Clone, Default)]
pub(crate) struct Problems {
    /// Why the paths are not served.
    pub(crate) not_served: watch::Sender<Option<String>>,
    /// Why the files of TLS are not usable.
    pub(crate) tls: watch::Sender<Option<String>>,
    /// Why the API server does not decide about tokens.
    pub(crate) reviews: watch::Sender<Option<String>>,
}

/// Serves the configured address, with at most `connections` connections at a time. `None` without
/// an address.
pub(crate) fn serve(
    config: &Config,
    roots: &Roots,
    views: &Views,
    connections: usize,
    problems: &Problems,
) -> Option<JoinHandle<()>> {
    let address = config.listen?;
    let pages = Pages::new(Readers {
        token: config.token_file.clone().map(Token::new),
        reviews: reviews(config, roots, &problems.reviews),
        certificate: config.tls.as_ref().is_some_and(|files| files.client_ca.is_some()),
    });
    let scrape = measures::scrape(views.clone(), roots.state.clone());
    let routes = http::routes(scrape, views.ready.clone(), pages.clone())
        .merge(page::routes(views.clone(), pages));
    let tls = Tls::new(config.tls.as_ref(), problems.tls.clone());
    Some(http::serve(address, routes, tls, connections, problems.not_served.clone()))
}

/// The decisions of the API server, if they are configured: as for `kubectl get --raw /metrics`,
/// the user of the token must have the verb `get` for the path `/metrics`.
#[cfg(feature = "cluster")]
fn reviews(
    config: &Config,
    roots: &Roots,
    problem: &watch::Sender<Option<String>>,
) -> Option<Reviews> {
    use crate::cluster::{Client, Credentials};
    use crate::telemetry::Verdict;
    if !config.authorize {
        return None;
    }
    let client = Client::new(Credentials::new(&config.credentials, &roots.kubelet, &roots.host));
    let review = move |token: String| {
        let client = client.clone();
        let verdict = async move {
            Ok(match client.user_of_token(&token).await? {
                None => Verdict::Unknown,
                Some(user) if client.may_get(&user, "/metrics").await? => Verdict::Permitted,
                Some(_) => Verdict::Forbidden,
            })
        };
        async move { verdict.await.map_err(|error: crate::cluster::ClusterError| error.to_string()) }
    };
    Some(Reviews::new(Box::new(move |token| Box::pin(review(token))), problem.clone()))
}

/// Without a client of the API server the configuration does not have this.
#[cfg(not(feature = "cluster"))]
fn reviews(_: &Config, _: &Roots, _: &watch::Sender<Option<String>>) -> Option<Reviews> {
    None
}
