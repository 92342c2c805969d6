// A certified provider of OpenID Connect on loopback, at the port of the second argument.
// Usage: node oidc_provider.mjs FOLDER_OF_OIDC_PROVIDER PORT
//
// Whoever signs in as `ID` or `ID+NAME` or `ID+NAME+GROUP+GROUP`, with any password, is a person with
// this id, name and groups. Standard input ends the process with its end.

import { pathToFileURL } from "node:url";

const [folder, port] = process.argv.slice(2);
console.info = console.warn = () => undefined;
const { default: Provider } = await import(pathToFileURL(`${folder}/lib/index.js`).href);

const issuer = `http://127.0.0.1:${port}`;
const provider = new Provider(issuer, {
  clients: [
    {
      client_id: "paceline",
      client_secret: "a secret: 100 %+",
      // Any port of loopback counts then.
      application_type: "native",
      redirect_uris: ["http://127.0.0.1/api/v1/oidc/callback"],
    },
    {
      client_id: "behind-proxy",
      client_secret: "other",
      token_endpoint_auth_method: "client_secret_post",
      redirect_uris: ["https://lab.example.org/lab/api/v1/oidc/callback"],
    },
  ],
  claims: {
    openid: ["sub"],
    email: ["email", "email_verified"],
    profile: ["preferred_username", "groups"],
  },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => {
      const [, name, ...groups] = id.split("+");
      const user = name ?? id;
      return {
        sub: id,
        preferred_username: user,
        email: `${user}@example.org`,
        email_verified: true,
        groups,
      };
    },
  }),
  cookies: { keys: ["a key"] },
  features: { devInteractions: { enabled: true } },
  pkce: { required: () => true },
});

const server = provider.listen(Number(port), "127.0.0.1", () => console.log(issuer));
process.stdin.resume();
process.stdin.on("end", () => {
  server.closeAllConnections();
  server.close();
});
